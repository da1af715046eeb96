"""What the module does without 3D Slicer, in Python 3.9 and its standard library.

service  requests to a landmarkd service, and one of them in a thread
answers  the JSON of an answer -> what is shown of each landmark, and back as a person corrected it
"""
