"""The draft folder's README.md: what this head is and what was measured, rendered from the report."""

from __future__ import annotations

from pathlib import Path

from mtptrain.drafts.folder import load_contract
from mtptrain.run import atomic_write
from mtptrain.validate.report import Report, render_markdown


def write_model_card(folder: Path, report: Report) -> None:
    """Writes the card beside the weights it describes."""
    promise = load_contract(folder)
    shared = " and ".join(promise.shared)
    lines = [
        f"# Draft head for {Path(promise.target_id).name}",
        "",
        f"Reads the taps {', '.join(promise.taps)} of the target (fingerprint `{promise.target_fingerprint}`), "
        f"{f'shares its frozen {shared}' if shared else 'shares no weights with it'}, "
        f"scores {promise.draft_vocab_size:,} tokens. "
        "What serving must keep is in `contract.json`. Trained with mtptrain.",
        "",
        "# Measured",
        "",
    ]
    atomic_write(folder / "README.md", "\n".join(lines) + render_markdown(report))
