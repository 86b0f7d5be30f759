"""Manual pages are read as articles that refer to each other."""

import gzip
import os
import pathlib
import tempfile
from unittest import mock

from absl.testing import absltest

from glm5_jax import config
from glm5_jax.environments.worlds.search import articles, manuals
from tests import environment

FROB = r""".\" A comment.
.TH frob 2 2023-02-05 "Some pages 6.03"
.SH NAME
frob, frobat \- turn a \fIknob\fP
.SH LIBRARY
Standard C library
.RI ( libc ", " \-lc )
.SH SYNOPSIS
.nf
.B #include <frob/knob.h>
.PP
.BI "int frob(int " knob );
.fi
.SH DESCRIPTION
.BR frob ()
turns a knob by one step to the right, as
.BR knob (4)
tells. It may fail; see
.BR exit (3),
and "\(aq\e\(aq" of {code}.
.PP
.TP
.B EAGAIN
Turn it again.
.SH "SEE ALSO"
.BR twist (1)
.SH COLOPHON
Nobody reads this.
"""
KNOB = """.TH knob 4 2020-01-01
.SH NAME
knob \\- a knob
.SH DESCRIPTION
A knob of 1974 is turned by frob(2), frobat(2) and others.
"""


class ManualsTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        pages = {
            "man/man2/frob.2": FROB,
            "man/man4/knob.4": KNOB,
            "man/man2/frob2.2": ".so man2/frob.2\n",
            "man/man1/empty.1": ".TH empty 1\n.SH NAME\nempty \\- nothing\n",
            "man/de/man4/dreh.4": KNOB,
        }
        for name, text in pages.items():
            path = self.folder / f"{name}.gz"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(gzip.compress(text.encode()))
        os.symlink("knob.4.gz", self.folder / "man/man4/other.4.gz")
        listed = self.folder / "manpages.list"
        paths = sorted(map(str, self.folder.rglob("*")))
        listed.write_text("\n".join([*paths, "/gone/man/man1/gone.1.gz"]))
        lists = listed, self.folder / "none.list"
        self.enterContext(mock.patch.object(manuals, "_LISTS", lists))

    def test_pages_are_articles(self):
        graph = articles.read.__wrapped__("manpages")
        frob, knob = graph.articles
        self.assertEqual(frob.names[:3], ("frob(2)", "frobat(2)", "frob2(2)"))
        self.assertEqual(frob.tags, ("header frob/knob.h",))
        self.assertEqual((knob.tags, knob.years), (("device",), {"1974"}))
        self.assertEqual((graph.targets, graph.sources), (((1,), (0,)),) * 2)
        self.assertEqual(graph.find("frob2"), 0)
        first, *others = frob.text.split("\n\n")
        self.assertEqual(
            first,
            "frob() turns a knob by one step to the right, as {knob(4)} tells. It may "
            "fail; see {exit(3)}, and \"'\\'\" of (code).",
        )
        self.assertIn("EAGAIN Turn it again.", others)
        self.assertIn("NAME\nfrob, frobat - turn a knob", others)
        self.assertNotIn("Nobody", frob.text)

    def test_missing_pages_are_told(self):
        self.enterContext(mock.patch.object(manuals, "_LISTS", ()))
        with self.assertRaisesRegex(config.InputError, "install manpages"):
            articles.read.__wrapped__("manpages")

    def test_they_are_hidden_where_they_stand(self):
        self.assertEqual(articles.places("manpages"), (pathlib.Path("/usr/share/man"),))


if __name__ == "__main__":
    environment.main()
