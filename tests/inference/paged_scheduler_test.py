"""Checks which request is admitted, by counting pages; no device computes anything."""

from absl.testing import parameterized

from glm5_jax.inference import paged_scheduler
from glm5_jax.inference.limits import Limits
from glm5_jax.inference.requests import Request
from tests import environment

SIZE, CHUNK, NUM_STEPS = 4, 16, 5
TEXT = [*range(1, 64)]


def make(num_pages, num_slots=4, chunk=CHUNK, host_pages=0, num_devices=1):
    limits = Limits(num_pages=num_pages, page_size=SIZE, host_pages=host_pages)
    return paged_scheduler.PagedScheduler(
        num_slots, chunk, num_devices, limits, NUM_STEPS
    )


def submit(machine, id, prompt, size=20):
    return machine.submit(Request(id, prompt, size))


def run(machine, number=1, version=0):
    """Runs dispatches, as a device would; returns the requests of each."""
    ids = []
    for _ in range(number):
        dispatch, drawn = machine.plan(version), []
        for part in dispatch.parts:
            left = part.work.request.max_new_tokens - part.num_drawn
            size = min(NUM_STEPS if dispatch.kind == "decode" else 1, left)
            drawn.append([70] * size * part.is_last)
        machine.advance(dispatch, drawn, version)
        for part, new in zip(dispatch.parts, drawn, strict=True):
            part.work.completion.tokens.extend(new)
        ids.append([part.work.request.id for part in dispatch.parts])
    return ids


def running(machine):
    """Returns the requests that have slots, after the next plan."""
    machine.plan(0)
    works = [slot.work for slot in machine.slots if slot.work is not None]
    return sorted(work.request.id for work in works)


class AdmissionTest(parameterized.TestCase):
    """A request needs pages for its text and the next token, and one for each other."""

    def check(self, least, make_ready, wanted):
        """Checks that `wanted` is admitted with `least` pages, and not with fewer."""
        for num_pages in (least, least - 1):
            machine = make(num_pages, host_pages=2)
            make_ready(machine)
            found = running(machine)
            self.assertEqual(wanted in found, num_pages == least, found)

    def test_beside_one_that_draws(self):
        def ready(machine):
            submit(machine, 0, [90] * 4)
            run(machine)  # has 1 page
            submit(machine, 1, TEXT[:8])

        self.check(1 + 3 + 1, ready, 1)
        self.assertEqual(make(5).num_free_pages, 5)

    def test_a_text_that_fills_its_pages_needs_one_more(self):
        """Else the first token that it draws could have no place."""

        def ready(machine):
            submit(machine, 0, [90] * 4)
            run(machine)
            submit(machine, 1, TEXT[:7])

        self.check(1 + 2 + 1, ready, 1)

    def test_beside_one_that_is_admitted_just_before(self):
        def ready(machine):
            submit(machine, 0, [90] * 4)
            run(machine)
            submit(machine, 1, [80] * 8)
            submit(machine, 2, TEXT[:8])

        self.check(1 + 3 + 3 + 2, ready, 2)

    @parameterized.parameters(40, 43)
    def test_beside_one_that_reads_a_long_prompt(self, size):
        """It has 4 of its 11 pages."""

        def ready(machine):
            submit(machine, 0, [90] * size)
            run(machine)
            submit(machine, 1, TEXT[:8])

        self.check(11 + 3 + 1, ready, 1)

    def test_beside_one_that_reads_its_text_again(self):
        """It has 8 + 1 + 5 tokens, of which the cache was lost."""

        def ready(machine):
            submit(machine, 0, [90] * 8)
            run(machine, 2)
            machine.forget()
            submit(machine, 1, TEXT[:8])

        self.check(4 + 3 + 1, ready, 1)

    def test_pages_in_host_memory_need_pages_of_the_device(self):
        """Of three pages two come back; after that the third is still to be taken."""

        def ready(machine):
            submit(machine, 0, [90] * 4)
            run(machine)
            machine.adopt(TEXT[:8], 0, 0)
            submit(machine, 1, TEXT[:9])

        self.check(1 + 3 + 1, ready, 1)

        def ready_for_two(machine):
            ready(machine)
            submit(machine, 2, [80] * 8)

        self.check(1 + 3 + 3 + 2, ready_for_two, 2)

    def test_pages_that_are_known_are_shared(self):
        def ready(machine):
            submit(machine, 0, TEXT[:8])
            run(machine)  # has 2 pages
            submit(machine, 1, TEXT[:9])

        self.check(2 + 1 + 1, ready, 1)

    def test_on_the_device_that_knows_most_of_the_prompt(self):
        """Although it has more requests than the other one."""
        machine = make(32, num_devices=2)
        for id, prompt in enumerate((TEXT[:9], TEXT[:10], [80] * 9)):
            work = submit(machine, id, prompt)
            run(machine)
            (slot,) = (slot for slot in machine.slots if slot.work is work)
            self.assertEqual(slot.device, 1 if id == 2 else 0)

    def test_one_that_is_alone_is_always_admitted(self):
        machine = make(2)
        submit(machine, 0, TEXT[:4])
        self.assertEqual(running(machine), [0])

    def test_a_request_waits_for_pages_that_another_is_reading(self):
        for size, chunk, wanted in (
            (16, 16, [[0], [0, 1], [1], [0]]),  # its last token is read in any case
            (17, 12, [[0], [0], [0, 1], [1]]),
            (18, 16, [[0], [0, 1], [1], [0]]),
        ):
            machine = make(64, chunk=chunk)
            submit(machine, 0, TEXT[:40], 99)
            other = submit(machine, 1, TEXT[:size], 99)
            self.assertEqual(run(machine, 4), wanted, size)
            self.assertEqual(other.completion.num_cached, (size - 1) // SIZE * SIZE)


class PagesTest(parameterized.TestCase):
    def test_a_slot_has_the_pages_of_its_next_tokens(self):
        machine = make(64)
        submit(machine, 0, TEXT[:17], 8)
        for size in (16, 17, 22, 24):  # in the cache after each dispatch
            (part,) = machine.plan(0).parts
            self.assertLen(part.slot.pages, -(-size // SIZE))
            run(machine)
            self.assertLen(part.slot.tokens, size)
        self.assertEqual(machine.num_free_pages, 64 - 6)

    def test_the_youngest_request_loses_its_pages_once(self):
        machine = make(5, num_slots=2)
        for id in range(2):
            submit(machine, id, [80 + id] * 4, 8)
        self.assertEqual(run(machine, 4), [[0, 1], [0], [0], [0]])
        self.assertEqual(machine.num_preempted, 1)

    def test_pages_are_free_when_their_request_is_gone(self):
        """One that begins alike waits meanwhile for the seven pages that it lacks."""
        machine = make(9)
        submit(machine, 0, TEXT[:8])
        run(machine)
        submit(machine, 1, [*TEXT[:8], *[80] * 24])
        submit(machine, 2, TEXT[:4])
        for _ in range(2):
            self.assertEqual(running(machine), [0])
        self.assertIsNone(machine.release(2))
        machine.release(0)
        self.assertEqual(machine.num_free_pages, 9)
        self.assertEqual(running(machine), [1])
        machine.release(1)
        self.assertEqual(machine.num_free_pages, 9)

    def test_whole_pages_of_a_prompt_are_known(self):
        machine = make(64)
        submit(machine, 0, TEXT[:16])
        run(machine)
        for size, known in ((16, 12), (17, 16), (18, 16), (60, 16)):
            self.assertEqual(machine.num_known(TEXT[:size]), known)
        self.assertEqual(machine.num_known([99, *TEXT]), 0)
        self.assertLen(machine.known(TEXT[:16], 0), 4)
        fresh = make(64, host_pages=4)
        self.assertLen(fresh.adopt(TEXT[:16], 0, 0)[1], 4)
        self.assertEqual(fresh.num_known(TEXT), 16)

    def test_a_page_that_two_versions_read_is_not_shared(self):
        for version, known in ((0, 4), (1, 0)):
            machine = make(64)
            submit(machine, 0, TEXT[:3])
            run(machine)
            run(machine, version=version)
            self.assertEqual(machine.num_known([*TEXT[:3], 70, 70]), known)

    def test_pages_are_of_one_version_of_the_weights(self):
        machine = make(64, host_pages=4)
        submit(machine, 0, TEXT[:16])
        run(machine)
        self.assertEqual(machine.known(TEXT[:16], 1), [])
        run(machine, version=1)
        self.assertEqual(machine.num_known(TEXT), 0)  # older weights read the first
        self.assertLen(machine.adopt(TEXT[:16], 0, 2)[1], 4)
        run(machine, version=2)
        self.assertEqual(machine.num_known(TEXT), 16)
        run(machine, version=3)
        self.assertEqual(machine.num_known(TEXT), 0)


if __name__ == "__main__":
    environment.main()
