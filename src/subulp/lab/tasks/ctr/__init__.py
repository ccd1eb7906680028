"""Click-through-rate prediction: DLRM over narrow embedding tables with a cache."""
