"""Training of one network: samples, loss, loop, checkpoints, and export to a model folder.

==============  =================================================================================
suggest         what the options leave open, chosen from the data, with reasons
canonical_pose  the frame of a second network: the upright mean shape
network         the network and its memory
warm_start      weights of another model, with each landmark's channels where they belong
augment         specimen -> random sample
truncation      samples of scans that end among the landmarks
losses          targets and loss
loop            the training loop, and batches drawn ahead in threads
checkpoint      saving and resuming
progress        progress bar, log lines, table and plot of a running training
history         history.csv and curves.png
export          the model folder that the service loads
==============  =================================================================================
"""
