"""Draw the bundled picture: a street with a stop sign, a traffic light, a clock, a ball and more.

python examples/draw_street.py [output.jpg]

Shapes are drawn at twice the size with OpenCV and scaled down, which smooths every edge.
"""

from __future__ import annotations

import sys
from pathlib import Path

import cv2
import numpy as np

from ridgeline.workloads.draw import save_image

STREET = Path(__file__).parents[1] / "src" / "ridgeline" / "assets" / "street.jpg"

WIDTH, HEIGHT = 960, 640
ZOOM = 2
HORIZON_Y = 400

Colour = tuple[int, int, int]  # RGB
Point = tuple[float, float]

INK = (40, 42, 48)
STEEL = (120, 124, 130)
WHITE = (245, 245, 242)


class Canvas:
    """An RGB picture drawn in units of the final pixels."""

    def __init__(self) -> None:
        self.pixels = np.zeros((HEIGHT * ZOOM, WIDTH * ZOOM, 3), np.uint8)

    def gradient(self, top_y: int, bottom_y: int, top: Colour, bottom: Colour) -> None:
        rows = slice(top_y * ZOOM, bottom_y * ZOOM)
        t = np.linspace(0, 1, (bottom_y - top_y) * ZOOM)[:, None, None]
        self.pixels[rows] = np.round((1 - t) * np.array(top) + t * np.array(bottom))

    def polygon(self, points: list[Point], colour: Colour) -> None:
        corners = np.round(np.array(points) * ZOOM).astype(np.int32)
        cv2.fillPoly(self.pixels, [corners], colour, cv2.LINE_AA)

    def box(self, x: float, y: float, w: float, h: float, colour: Colour) -> None:
        self.polygon([(x, y), (x + w, y), (x + w, y + h), (x, y + h)], colour)

    def disc(self, x: float, y: float, radius: float, colour: Colour, squash: float = 1.0) -> None:
        centre, axes = (round(x * ZOOM), round(y * ZOOM)), (round(radius * ZOOM), round(radius * squash * ZOOM))
        cv2.ellipse(self.pixels, centre, axes, 0, 0, 360, colour, cv2.FILLED, cv2.LINE_AA)

    def line(self, points: list[Point], colour: Colour, width: float) -> None:
        corners = np.round(np.array(points) * ZOOM).astype(np.int32)
        cv2.polylines(self.pixels, [corners], False, colour, max(1, round(width * ZOOM)), cv2.LINE_AA)

    def shade(self, x: float, y: float, radius: float, squash: float, strength: float) -> None:
        """Darken a soft ellipse: a shadow on the ground."""
        mask = np.zeros(self.pixels.shape[:2], np.float32)
        centre, axes = (round(x * ZOOM), round(y * ZOOM)), (round(radius * ZOOM), round(radius * squash * ZOOM))
        cv2.ellipse(mask, centre, axes, 0, 0, 360, strength, cv2.FILLED)
        mask = cv2.GaussianBlur(mask, (0, 0), 3 * ZOOM)
        self.pixels = np.round(self.pixels * (1 - mask[:, :, None])).astype(np.uint8)

    def finish(self) -> np.ndarray:
        return cv2.resize(self.pixels, (WIDTH, HEIGHT), interpolation=cv2.INTER_AREA)


def draw_street() -> np.ndarray:
    """The picture as uint8 [640, 960, 3] RGB."""
    canvas = Canvas()
    canvas.gradient(0, HORIZON_Y, (112, 170, 226), (214, 232, 244))
    canvas.gradient(HORIZON_Y, HEIGHT, (172, 170, 164), (146, 144, 140))
    _clouds(canvas)
    _houses(canvas)
    _road(canvas)
    _clock(canvas, 470, 190, 62)
    _traffic_light(canvas, 690, 110)
    _stop_sign(canvas, 150, 225, 110)
    _kite(canvas, 820, 70)
    _bench(canvas, 744, 436)
    _ball(canvas, 300, 560, 58)
    return canvas.finish()


def _clouds(canvas: Canvas) -> None:
    for x, y, radius in ((90, 60, 30), (125, 50, 38), (165, 62, 28), (600, 48, 24), (630, 40, 32), (665, 50, 22)):
        canvas.disc(x, y, radius, (240, 245, 250), 0.55)


def _houses(canvas: Canvas) -> None:
    fronts = ((0, 150, 150, (176, 122, 98)), (150, 190, 190, (206, 190, 160)), (560, 170, 180, (158, 106, 92)))
    for x, top, width, wall in (*fronts, (740, 210, 220, (192, 178, 156))):
        canvas.box(x, top, width, HORIZON_Y - top + 14, wall)
        canvas.box(x - 4, top - 10, width + 8, 12, tuple(channel * 3 // 5 for channel in wall))
        for column in range(int(width) // 50):
            for row in range((HORIZON_Y - top - 30) // 70):
                _window(canvas, x + 14 + column * 50, top + 22 + row * 70)
    # the square behind, with trees
    for x, y, radius in ((360, 360, 42), (410, 345, 50), (540, 362, 40), (505, 348, 44)):
        canvas.box(x - 4, y, 8, 60, (96, 72, 52))
        canvas.disc(x, y - 10, radius, (74, 116, 62))
        canvas.disc(x - radius * 0.25, y - 10 - radius * 0.3, radius * 0.6, (96, 140, 76))


def _window(canvas: Canvas, x: float, y: float) -> None:
    canvas.box(x - 3, y - 3, 30, 46, (232, 226, 214))
    canvas.box(x, y, 24, 40, (92, 116, 138))
    canvas.polygon([(x, y), (x + 16, y), (x, y + 28)], (140, 164, 184))
    canvas.line([(x + 12, y), (x + 12, y + 40)], (232, 226, 214), 2)


def _road(canvas: Canvas) -> None:
    canvas.polygon([(330, 414), (600, 414), (900, 640), (60, 640)], (84, 86, 92))
    canvas.polygon([(322, 414), (330, 414), (60, 640), (36, 640)], (200, 198, 192))
    canvas.polygon([(600, 414), (608, 414), (924, 640), (900, 640)], (200, 198, 192))
    for near, far in ((414, 428), (446, 470), (498, 536), (580, 640)):
        near_w, far_w = 2 + (near - 414) / 24, 2 + (far - 414) / 24
        canvas.polygon([(466 - near_w, near), (466 + near_w, near), (468 + far_w, far), (468 - far_w, far)], WHITE)


def _stop_sign(canvas: Canvas, x: float, y: float, radius: float) -> None:
    foot_y = 562
    canvas.shade(x + 24, foot_y + 2, 50, 0.12, 0.35)
    canvas.box(x - 7, y, 14, foot_y - y, STEEL)
    canvas.box(x - 7, y, 5, foot_y - y, (158, 162, 168))
    for scale, colour in ((1.0, (150, 22, 28)), (0.985, WHITE), (0.92, (200, 24, 34))):
        angles = np.radians(22.5 + 45 * np.arange(8))
        canvas.polygon([(x + radius * scale * np.cos(a), y + radius * scale * np.sin(a)) for a in angles], colour)
    font, letters = cv2.FONT_HERSHEY_SIMPLEX, round(radius * 0.14)
    (unit_w, _), _ = cv2.getTextSize("STOP", font, 10, letters)
    scale = 10 * 1.5 * radius * ZOOM / unit_w
    (text_w, text_h), _ = cv2.getTextSize("STOP", font, scale, letters)
    origin = (round(x * ZOOM - text_w / 2), round(y * ZOOM + text_h / 2))
    cv2.putText(canvas.pixels, "STOP", origin, font, scale, WHITE, letters, cv2.LINE_AA)


def _traffic_light(canvas: Canvas, x: float, y: float) -> None:
    foot_y = 466
    canvas.shade(x + 20, foot_y + 2, 36, 0.14, 0.35)
    canvas.box(x - 5, y + 60, 10, foot_y - y - 60, INK)
    canvas.box(x - 28, y - 4, 56, 158, (222, 178, 40))
    canvas.box(x - 24, y, 48, 150, (30, 32, 34))
    for row, (lamp, glint) in enumerate((((255, 62, 44), (255, 170, 150)), ((92, 76, 24), None), ((22, 78, 44), None))):
        centre_y = y + 27 + row * 48
        canvas.disc(x, centre_y, 20, (14, 15, 16))
        canvas.disc(x, centre_y, 17, lamp)
        if glint:
            canvas.disc(x - 3, centre_y - 4, 8, glint)
        canvas.polygon([(x - 21, centre_y - 14), (x, centre_y - 24), (x + 21, centre_y - 14), (x, centre_y - 18)], INK)


def _clock(canvas: Canvas, x: float, y: float, radius: float) -> None:
    canvas.shade(x + 18, 423, 34, 0.12, 0.3)
    canvas.box(x - 8, y + radius, 16, 420 - y - radius, (52, 62, 58))
    canvas.box(x - 20, 408, 40, 14, (52, 62, 58))
    canvas.disc(x, y, radius + 9, (40, 50, 46))
    canvas.disc(x, y, radius + 3, (176, 150, 84))
    canvas.disc(x, y, radius, (250, 248, 238))
    for hour in range(12):
        angle = np.radians(30 * hour)
        inner = 0.74 if hour % 3 == 0 else 0.82
        direction = np.array((np.sin(angle), -np.cos(angle)))
        ends = [tuple(np.array((x, y)) + radius * reach * direction) for reach in (inner, 0.92)]
        canvas.line(ends, INK, 5 if hour % 3 == 0 else 3)
    for degrees, reach, width in ((305, 0.5, 6), (60, 0.72, 4)):  # ten past ten
        angle = np.radians(degrees)
        canvas.line([(x, y), (x + radius * reach * np.sin(angle), y - radius * reach * np.cos(angle))], INK, width)
    canvas.disc(x, y, 5, INK)


def _kite(canvas: Canvas, x: float, y: float) -> None:
    top, right, bottom, left = (x, y - 48), (x + 34, y), (x, y + 66), (x - 34, y)
    tail = [(x, y + 66), (x - 12, y + 92), (x + 6, y + 118), (x - 14, y + 146)]
    canvas.line(tail, INK, 1.5)
    for knot_x, knot_y in tail[1:]:
        canvas.polygon(
            [(knot_x - 9, knot_y - 5), (knot_x + 9, knot_y + 5), (knot_x + 9, knot_y - 5), (knot_x - 9, knot_y + 5)],
            (230, 76, 60),
        )
    for corners, colour in (
        ((top, right), (236, 84, 60)),
        ((right, bottom), (250, 190, 50)),
        ((bottom, left), (60, 130, 200)),
        ((left, top), (70, 170, 110)),
    ):
        canvas.polygon([(x, y), *corners], colour)
    canvas.line([top, bottom], INK, 1.5)
    canvas.line([left, right], INK, 1.5)


def _bench(canvas: Canvas, x: float, y: float) -> None:
    wood, dark = (166, 108, 58), (122, 78, 42)
    canvas.shade(x + 95, y + 84, 115, 0.12, 0.35)
    for leg in (14, 160):
        canvas.box(x + leg, y - 6, 9, 92, INK)
        canvas.box(x + leg + 16, y + 44, 7, 32, INK)
    for slat in range(3):
        canvas.box(x, y - 2 + slat * 15, 190, 11, wood)
        canvas.box(x, y + 7 + slat * 15, 190, 2, dark)
    canvas.polygon([(x, y + 46), (x + 190, y + 46), (x + 200, y + 62), (x - 10, y + 62)], wood)
    canvas.box(x - 10, y + 62, 210, 5, dark)


def _ball(canvas: Canvas, x: float, y: float, radius: float) -> None:
    canvas.shade(x + 10, y + radius, radius * 1.1, 0.25, 0.45)
    for step in range(24):
        t = step / 23
        tone = round(190 + 62 * t)
        canvas.disc(x - 0.28 * radius * t, y - 0.3 * radius * t, radius * (1 - 0.72 * t), (tone, tone, tone))
    spots = [(0.0, 0.0, 0.32)] + [(0.78 * np.sin(a), -0.78 * np.cos(a), 0.22) for a in np.radians(72 * np.arange(5))]
    for dx, dy, size in spots:
        angles = np.radians(72 * np.arange(5) + (0 if size > 0.3 else 180))
        corners = [(x + radius * (dx + size * np.sin(a)), y + radius * (dy - size * np.cos(a))) for a in angles]
        canvas.polygon(corners, (34, 34, 38))
    for a in np.radians(72 * np.arange(5)):
        ends = [(x + radius * r * np.sin(a), y - radius * r * np.cos(a)) for r in (0.3, 0.6)]
        canvas.line(ends, (60, 60, 64), 2)


if __name__ == "__main__":
    save_image(sys.argv[1] if len(sys.argv) > 1 else STREET, draw_street())
