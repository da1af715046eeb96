"""Other ways to do what landmarkd does, each as plain as a reader would write it."""
