"""The matrices are small: more than one BLAS thread only costs time. Set before numpy is loaded."""
import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
