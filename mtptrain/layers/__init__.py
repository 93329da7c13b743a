"""Parts that targets and drafts share."""
