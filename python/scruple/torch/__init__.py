"""Drop-in PyTorch optimizers whose weights, moments and gradients take 5 to 7 bytes per parameter.

from scruple.torch import AdamW, cast_model, release_gradients
cast_model(model, torch.bfloat16)
opt = AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)
"""

from .cast import cast_model
from .compress import compress_weights
from .numerics import check_updates, watch_updates
from .optimizers import SGD, SGDW, Adagrad, Adam, AdamW, Lion, RMSprop
from .release import release_gradients
from .scaler import LossScaler

__all__ = ["SGD", "SGDW", "Adagrad", "Adam", "AdamW", "Lion", "RMSprop"]
__all__ += ["LossScaler", "cast_model", "check_updates", "compress_weights", "release_gradients", "watch_updates"]
