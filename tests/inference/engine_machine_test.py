"""An engine and a service under any sequence of commands, failures and interrupts.

Hypothesis draws the sequences. Most run on devices without arrays; a few run the model.
"""

import contextlib
import functools
from unittest import mock

import hypothesis
from absl.testing import absltest, parameterized
from hypothesis import stateful
from hypothesis import strategies as st

from glm5_jax.inference import events, programs, service
from glm5_jax.inference.requests import Request
from tests import environment
from tests.inference import fake_devices, service_test

PROMPTS = st.builds(
    lambda same, size, tail: [same] * size + tail,
    st.integers(1, 2),
    st.integers(1, 24),
    st.lists(st.integers(1, 3), max_size=14),
)
REQUESTS = st.tuples(PROMPTS, st.integers(1, 20), st.integers(0, 4))
# What happens to an act: nothing, or ctrl-C before a line of it.
LINES = st.none() | st.integers(1, 25) | st.integers(1, 150)


def settings(max_examples, num_steps):
    return hypothesis.settings(
        max_examples=max_examples,
        stateful_step_count=num_steps,
        deadline=None,
        derandomize=True,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=[*hypothesis.HealthCheck],
        phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
    )


class EngineMachine(stateful.RuleBasedStateMachine):
    """One thread submits, steps, aborts and publishes; ctrl-C may come at any line."""

    def __init__(self):
        super().__init__()
        self.stack = contextlib.ExitStack()
        self.stack.enter_context(fake_devices.installed())
        self.live, self.done, self.num_submitted = {}, {}, 0
        self.num_idle = 0  # steps since the oldest request got on

    @stateful.initialize(
        num_slots=st.sampled_from((1, 3, 5)),
        num_pages=st.sampled_from((0, 16, 20, 90)),
        host_pages=st.sampled_from((0, 3, 40)),
        num_drafts=st.sampled_from((0, 1, 3)),
    )
    def begin(self, num_slots, num_pages, host_pages, num_drafts):
        limits = {"host_pages": host_pages if num_pages else 0}
        limits["num_drafts"] = num_drafts
        self.machine = fake_devices.make_engine(num_slots, num_pages, **limits)
        self.num_slots, self.num_pages = num_slots, num_pages

    def act(self, call, line):
        """Calls it, with ctrl-C before a line; returns what it returned, or None."""
        if line is None:
            return call()
        self.num_idle = -fake_devices.MAX_PREFILLS  # what was lost is read again
        self.machine._runner.waited.clear()
        try:
            with fake_devices.ctrl_c(line):
                return call()
        except KeyboardInterrupt:
            return None

    def forget_ended(self):
        """Takes notice of requests that an interrupted call has removed."""
        pending = {*self.machine.running, *self.machine._finished}
        self.live = {id: r for id, r in self.live.items() if id in pending}

    @stateful.rule(drawn=REQUESTS, line=LINES)
    def submit(self, drawn, line):
        prompt, size, stop = drawn
        request = Request(self.num_submitted, prompt, size)
        if stop == 0:  # the third token, or the whole length
            ends = {fake_devices.token_of(request, 2)}
            request = Request(request.id, prompt, size, frozenset(ends))
        self.num_submitted += 1
        self.live[request.id] = request
        self.act(lambda: self.machine.submit(request), line)
        self.forget_ended()

    @stateful.precondition(lambda self: self.live)
    @stateful.rule(data=st.data(), line=LINES)
    def abort(self, data, line):
        id = data.draw(st.sampled_from(sorted(self.live)))
        self.act(lambda: self.machine.abort(id), line)
        if line is None:
            del self.live[id]
        else:
            self.step(None)
            self.forget_ended()

    @stateful.rule(line=LINES)
    def publish(self, line):
        version = self.machine.version + 1
        self.act(lambda: self.machine.publish({}, version), line)

    @stateful.precondition(lambda self: self.num_pages)
    @stateful.rule(prompt=PROMPTS, first=st.integers(0, 2))
    def hand_over(self, prompt, first):
        fake_devices.hand_over(self.machine, prompt, first)

    @stateful.rule()
    def clear_cache(self):
        self.machine.clear_cache()
        self.num_idle = -fake_devices.MAX_PREFILLS

    @stateful.rule(takes_cache=st.booleans())
    def inject(self, takes_cache):
        self.machine._runner.faults[:] = [takes_cache]

    @stateful.rule(line=LINES)
    def step(self, line):
        oldest = self.progress()
        faults = bool(self.machine._runner.faults)
        if not any(slot.is_decoding for slot in self.machine._scheduler.slots):
            self.machine._runner.waited.clear()  # nobody waits
        try:
            self.take(self.act(self.machine.step, line))
        except RuntimeError:
            assert faults
            self.num_idle = -fake_devices.MAX_PREFILLS
            return
        self.num_idle += 1
        if oldest is None or self.progress() != oldest:
            self.num_idle = min(self.num_idle, 0)

    @stateful.rule(count=st.integers(2, 12))
    def run(self, count):
        for _ in range(count):
            self.step(None)

    def take(self, finished):
        """Checks completions; each request ends once."""
        for id, completion in finished or ():
            request = self.live.pop(id)
            assert completion.tokens == fake_devices.completed(request)
            is_stop = completion.tokens[-1] in request.stop_ids
            assert completion.finish_reason == ("stop" if is_stop else "length")
            assert completion.versions == sorted(completion.versions)
            text = [*request.prompt, *completion.tokens[:-1]]
            assert completion.experts[:, 0, 0].tolist() == text

    def progress(self):
        """Returns how far the oldest request in a slot is."""
        busy = [slot for slot in self.machine._scheduler.slots if slot.work is not None]
        if not busy:
            return None
        slot = min(busy, key=lambda slot: slot.work.order)
        return slot.work.order, len(slot.tokens), len(slot.work.completion.tokens)

    @stateful.invariant()
    def no_page_is_lost(self):
        fake_devices.check_pages(self.machine)

    @stateful.invariant()
    def the_oldest_request_gets_on(self):
        assert self.num_idle <= fake_devices.MAX_PREFILLS + 1, "it starves"

    @stateful.invariant()
    def draws_wait_for_a_bounded_number_of_tokens(self):
        waited = self.machine._runner.waited
        limit = fake_devices.PREFILL_TOKENS + fake_devices.CHUNK
        assert sum(waited) < limit, waited

    def teardown(self):
        with self.stack:
            if not hasattr(self, "machine"):
                return
            self.machine._runner.faults.clear()
            # A request alone takes 3 steps to read and 4 to draw.
            for _ in range(20 + 7 * len(self.live)):
                if self.live:
                    self.step(None)
                    self.no_page_is_lost()
                    self.the_oldest_request_gets_on()
            assert not self.live, "requests never finish"
            assert self.machine.num_pending == self.machine.num_waiting == 0
            assert self.machine.num_free_slots == self.num_slots
            assert self.machine.num_free_pages == self.num_pages
            programs = self.machine._runner.programs
            assert len(programs) <= self.machine.max_programs


class ServiceMachine(stateful.RuleBasedStateMachine):
    """Any thread submits, aborts, publishes and pauses; any dispatch may fail.

    The weights of all versions are equal, so every token is known.
    """

    choices = st.sampled_from((0, 9))  # numbers of pages

    def __init__(self):
        super().__init__()
        self.stack = contextlib.ExitStack()
        self.todo, self.clients, self.futures = [], {}, []
        self.version = 0

    @stateful.initialize(data=st.data())
    def begin(self, data):
        self.num_pages = data.draw(self.choices)
        self.service = service.Service(self.make_engine(self.num_pages))
        self.stack.callback(self.service.close)

    def make_engine(self, num_pages):
        """Makes an engine whose dispatches `self.faults` may let fail."""
        raise NotImplementedError

    @stateful.rule(number=st.integers(1, 3))
    def submit(self, number):
        for request in self.todo[:number]:
            self.clients[request.id] = request, service_test.Client()
            self.service.submit(*self.clients[request.id])
        del self.todo[:number]

    @stateful.rule(id=st.integers(0, 9))
    def abort(self, id):
        self.service.abort(id)

    @stateful.rule()
    def publish(self):
        self.version += 1
        self.futures.append(self.service.publish(self.params, self.version))

    @stateful.rule()
    def clear_cache(self):
        self.futures.append(self.service.clear_cache())

    @stateful.rule(mode=st.sampled_from(("keep", "wait", "abort")))
    def pause(self, mode):
        self.futures.append(self.service.pause(mode))

    @stateful.rule()
    def resume(self):
        self.futures.append(self.service.resume())

    @stateful.rule(faults=st.lists(st.sampled_from((None, None, False, True))))
    def inject(self, faults):
        self.faults[:] = faults

    def teardown(self):
        with self.stack:
            if not hasattr(self, "service"):
                return
            assert self.service.drain(service_test.SECONDS), "requests never end"
            for future in self.futures:
                future.result(service_test.SECONDS)
            for request, client in self.clients.values():
                self.check(request, client.events)
            stats = self.service.stats()
            assert sum(stats.ended.values()) == len(self.clients)
            assert (stats.running, stats.waiting) == (0, 0)
            assert stats.free_pages == self.num_pages
            drawn = (
                len(c.events[-1].completion.tokens) for _, c in self.clients.values()
            )
            assert stats.drawn_tokens == sum(drawn)

    def check(self, request, found):
        """Checks that a request has its tokens in order, each once, then one end."""
        *drawn, end = found
        assert isinstance(end, events.End)
        ids = [i for event in drawn for i in event.ids]
        assert ids == end.completion.tokens
        wanted = self.wanted(request)
        assert ids == wanted[: len(ids)]
        is_whole = end.reason in ("stop", "length")
        assert is_whole == (len(ids) == len(wanted)), end
        versions = [version for event in drawn for version in event.versions]
        assert versions == end.completion.versions == sorted(versions)


class FakeServiceMachine(ServiceMachine):
    choices, params = st.sampled_from((0, 16, 20)), {}

    def __init__(self):
        super().__init__()
        self.todo = [
            Request(i, [i % 3 + 1] * size + [i], 3 * i % 20 + 1)
            for i, size in enumerate((3, 20, 20, 5, 33, 9, 20, 2, 14, 40))
        ]

    def make_engine(self, num_pages):
        self.stack.enter_context(fake_devices.installed())
        num_drafts = 0 if num_pages == 16 else 3
        machine = fake_devices.make_engine(3, num_pages, num_drafts=num_drafts)
        self.faults = machine._runner.faults
        return machine

    def wanted(self, request):
        return fake_devices.completed(request)


class ModelServiceMachine(ServiceMachine):
    def __init__(self):
        super().__init__()
        self.todo, self.faults = [*service_test.make_requests()], []
        self.params = service_test.params()

    def make_engine(self, num_pages):
        for name in ("prefill", "decode"):
            program = functools.partial(self.failing, getattr(programs, name))
            self.stack.enter_context(mock.patch.object(programs, name, program))
        return service_test.make_engine(num_pages)

    def failing(self, program, *args, **options):
        fault = self.faults.pop(0) if self.faults else None
        if fault:
            program(*args, **options)  # its results are lost
        if fault is not None:
            raise RuntimeError("injected")
        return program(*args, **options)

    def wanted(self, request):
        return service_test.wanted()[request.id].tokens


class CtrlCTest(absltest.TestCase):
    def test_at_any_line_of_a_run_with_preemptions(self):
        """Interrupts one run at its 5th line, one at its 64th, and so on."""
        sizes = ((9, 50), (12, 20), (12, 1), (13, 1), (9, 30), (3, 12))
        requests = [
            Request(i, [i % 2 + 1] * size, new) for i, (size, new) in enumerate(sizes)
        ]
        num_runs = 0
        with fake_devices.installed():
            for line in range(5, 10**6, 59):
                machine, done = fake_devices.make_engine(3, 17), {}
                for request in requests:
                    machine.submit(request)
                was_interrupted = False
                try:
                    with fake_devices.ctrl_c(line):
                        while len(done) < len(requests):
                            done |= machine.step()
                except KeyboardInterrupt:
                    was_interrupted = True
                for _ in range(100):
                    done |= machine.step()
                    fake_devices.check_pages(machine)
                    if not machine.num_pending:
                        break
                for request in requests:
                    wanted = fake_devices.completed(request)
                    self.assertEqual(done[request.id].tokens, wanted, line)
                    read = done[request.id].experts[:, 0, 0].tolist()
                    self.assertEqual(read, [*request.prompt, *wanted[:-1]], line)
                self.assertEqual(machine.num_free_pages, 17)
                if not was_interrupted:
                    break
                num_runs += 1
        self.assertGreater(machine.num_preempted, 0)
        self.assertGreater(num_runs, 15)


class MachineTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("engine", EngineMachine, 35, 40),
        ("service", FakeServiceMachine, 30, 25),
        ("service_with_a_model", ModelServiceMachine, 6, 25),
    )
    def test_any_sequence_of_commands(self, machine, max_examples, num_steps):
        service_test.wanted()  # while no dispatch fails
        how = settings(max_examples, num_steps)
        stateful.run_state_machine_as_test(machine, settings=how)


if __name__ == "__main__":
    environment.main()
