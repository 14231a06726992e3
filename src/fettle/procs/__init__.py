"""The one way to start a process: asked in typed messages, paused, given a deadline, killed with all that it started.

    process     a process and its tree: start, wait, pause, last line, close
    child       one that answers: requests and answers over a socket pair, a deadline for each
    forks       children that begin as forks of a process which has imported what they need
    parent      the same from inside: what a process of fettle's does first, and how it answers
    ranks       several that answer as one: launcher starts them with torchrun's engine, at a rendezvous
    nodes       other machines, which start their share of them
    listener    connections from those who know a key

Other rooms import these files one by one: a server starts its first worker before anything but the standard library is
imported, which is all that `process` needs.
"""
