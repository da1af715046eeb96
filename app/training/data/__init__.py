"""Scans and landmark files of a training: read, checked, and split into training and held out.

==============  =================================================================================
specimens       pairs scans with landmark files; a specimen's voxels and points, ready to augment
summary         what is known of a specimen without keeping its voxels
issues          errors, warnings and notes about the data, and their table
check_data      all checks of a data set together
check_frames    points outside their scan, and the mistake about frames that explains them
check_labels    different spellings of one landmark, rare landmarks, points placed twice
check_shapes    misplaced and swapped landmarks, odd sizes and poses
mirror          mirror images of specimens
split           which specimens are held out for validation
folds           which specimens are held out together in cross-validation
==============  =================================================================================
"""
