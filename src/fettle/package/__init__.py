"""Model packages: a tuned model as a folder or zip of data, how it is made, checked, loaded and called."""
