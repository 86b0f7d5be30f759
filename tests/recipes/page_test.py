"""Both renderings of a page, and what must be escaped in them."""

import base64
import io
import pathlib
from xml.etree import ElementTree

import PIL.Image
from absl.testing import absltest

from glm5_jax.recipes import page
from tests import environment

TEXT = "a < b & ``` | \x1b[0m \ud7ff"


class PageTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = pathlib.Path(self.create_tempdir().full_path)
        path = self.folder / "curves" / "a b.png"
        path.parent.mkdir()
        PIL.Image.effect_noise((40, 20), 64).convert("RGB").save(path)
        self.blocks = [
            page.Heading("1 < 2"),
            page.Paragraph("Made by `run --x=<y>`."),
            page.Table(("name", "x|y"), [("a|b", "1"), ("<c>", "2")]),
            page.Quotation(TEXT),
            page.Picture(path, "A curve"),
            page.Picture(path, "For HTML", only_html=True),
        ]

    def test_html_is_well_formed_and_self_contained(self):
        text = page.to_html("T & T", self.blocks)
        tree = ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>"))
        self.assertEqual(tree.findtext("head/title"), "T & T")
        self.assertEqual(tree.findtext("body/h2"), "1 < 2")
        self.assertEqual(tree.findtext("body/p/code"), "run --x=<y>")
        cells = [cell.text for cell in tree.findall("body/table/tr/td")]
        self.assertEqual(cells, ["a|b", "1", "<c>", "2"])
        self.assertEqual(tree.findtext("body/pre"), TEXT.replace("\x1b", "\ufffd"))
        sources = [image.get("src") for image in tree.iter("img")]
        self.assertLen(sources, 2)
        for source in sources:
            kind, data = source.split(",")
            self.assertEqual(kind, "data:image/png;base64")
            image = PIL.Image.open(io.BytesIO(base64.b64decode(data)))
            self.assertEqual((image.size, image.mode), ((40, 20), "P"))
        self.assertNotIn("http", text)

    def test_markdown_keeps_the_columns_and_the_quotation(self):
        text = page.to_markdown("T", self.blocks, self.folder)
        self.assertIn("| name | x\\|y |\n| --- | ---: |\n| a\\|b | 1 |", text)
        self.assertIn(f"````text\n{TEXT.replace(chr(27), chr(0xFFFD))}\n````", text)
        self.assertIn("![A curve](curves/a%20b.png)", text)
        self.assertNotIn("For HTML", text)


if __name__ == "__main__":
    environment.main()
