"""The data set and the recorded results of the demo."""
