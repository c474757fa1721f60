"""One page per diagnostic code; `carbon-compile explain CODE` prints it."""
