"""longspan inside Hugging Face transformers; needs `longspan[huggingface]`.

Importing this registers every method as an attention backend:

>>> import longspan.huggingface
>>> model = AutoModel.from_pretrained("bert-base-uncased", attn_implementation="nystrom")
"""

from longspan.huggingface.backend import register
from longspan.huggingface.conversion import convert, load
from longspan.huggingface.positions import extend_positions
from longspan.huggingface.published import config_from, from_transformers, rename

__all__ = [
    "config_from",
    "convert",
    "extend_positions",
    "from_transformers",
    "load",
    "register",
    "rename",
]

register()
