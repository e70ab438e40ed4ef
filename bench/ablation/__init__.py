"""The forward of both sides with another softmax, for suite "fa2" alone.

It is the shipped kernel's source, compiled with another function in place of its
`online_softmax_update`. The modules are twins.
"""
