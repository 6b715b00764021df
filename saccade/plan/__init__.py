"""Plans of memory, layouts, capacity and load before anything is trained or served: `saccade plan`.

    training.py      memory of a training step on a GPU, by `train`'s own memory model, and what to change
    serving.py       which storage scheme fits a GPU and a load; pages are counted by the engine's own functions
    served_model.py  bytes of a model's weights in every scheme, and of the engine's largest step
    throughput.py    times in a steady state, from bandwidth and peak throughput
    gpus.py          GPUs by name

    cluster.py       a training job, its GPUs, and the layouts that are compared
    layouts.py       the best layouts of a training run on a cluster, from steps that `train` records
    prices.py        seconds of kernels, as measured, and of collectives, by models of links
    timeline.py      when the operations of a step run, and how much communication nothing hides
    stages.py        the operations of a step cut into the stages of a pipeline
    ragged.py        packed sequences with unequal images, and the slowest of the ranks
    layout_report.py the plan of layouts as text, JSON and a page

Nothing is loaded and nothing is allocated: models are built on the meta device.
"""
