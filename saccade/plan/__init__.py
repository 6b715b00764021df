"""Plans of memory, capacity and load before anything is trained or served: `saccade plan`.

    training.py      memory of a training step on a GPU, by `train`'s own memory model, and what to change
    serving.py       which storage scheme fits a GPU and a load; pages are counted by the engine's own functions
    served_model.py  bytes of a model's weights in every scheme, and of the engine's largest step
    throughput.py    times in a steady state, from bandwidth and peak throughput
    gpus.py          GPUs by name

Nothing is loaded and nothing is allocated: models are built on the meta device.
"""
