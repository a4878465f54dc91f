"""The residual convolution of values along the sequence: one filter a head, for all its channels.

    output[n] = y[n] + Σ_j weight[j] · v[n + j − K // 2]

Beyond the ends, and where a mask hides them, values count as zero.
"""

from longspan.attention.convolution.api import add_convolution

__all__ = ["add_convolution"]
