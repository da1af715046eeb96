"""Training, evaluation and calibration of the models that the service loads."""
