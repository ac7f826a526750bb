"""Preloaded into the forkserver of the tests: in the worlds' processes too, warnings are errors."""

import warnings

warnings.simplefilter("error")
warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)
