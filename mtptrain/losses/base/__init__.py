"""What a loss of the shelf is: values and gradients of rows, in closed form, and what they are made into.

A vocabulary loss sees blocks of rows with both distributions and gives one or more terms with their
gradients in the logits; what it makes of the terms' values, one number a row, is plain autograd and may look
at whole chains. A feature loss looks at states alone. `chunks` runs either over all rows. It gives up
second derivatives.
"""

from mtptrain.losses.base.formula import Block, FeatureLoss, Loss, Term, VocabLoss
from mtptrain.losses.base.rows import LossSums, Rows

__all__ = ["Block", "FeatureLoss", "Loss", "LossSums", "Rows", "Term", "VocabLoss"]
