from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from twin_attention.interop.rendering.plots import legend


def test_a_legend_is_no_wider_than_its_figure():
    figure = Figure(figsize=(6, 3), layout="constrained")
    axes = figure.subplots()
    for i in range(7):
        axes.plot([0, 1], [i, i], label=f"torch triton sm9{i}")
    legend(figure)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    (box,) = (found.get_window_extent(canvas.get_renderer()) for found in figure.legends)
    assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1
