"""The topic against a naive one, in memory and on disk, see `machines`."""

from model.machines import (
    SETTINGS,
    DiskMachine,
    EphemeralMachine,
    OrderedEphemeralMachine,
    OrderedMachine,
    PrivateMachine,
    TopicMachine,
)

TestMemory = TopicMachine.TestCase
TestDisk = DiskMachine.TestCase
TestEphemeral = EphemeralMachine.TestCase
TestPrivate = PrivateMachine.TestCase
TestOrdered = OrderedMachine.TestCase
TestOrderedEphemeral = OrderedEphemeralMachine.TestCase
TestMemory.settings = TestDisk.settings = TestEphemeral.settings = TestPrivate.settings = SETTINGS
TestOrdered.settings = TestOrderedEphemeral.settings = SETTINGS


def test_message_that_is_due_when_its_channel_gets_it_is_ready_after_a_seek() -> None:
    """A sequence of steps that a random run found."""
    machine = TopicMachine()
    try:
        machine.begin([], [])
        machine.operate_topic("pause topic")
        machine.converse([(0, 0, [("FIN", 0)])])
        machine.publish([(1, 0, 10)])
        machine.converse([(0, 0, [("FIN", 0)]), (0, 10, [("FIN", 10)])])
        machine.operate_topic("unpause topic")
        machine.seek(pick=0, place=0, keep=False)
        machine.topics_agree()
        machine.channels_agree()
        machine.consumers_agree()
        machine.deadlines_are_not_late()
    finally:
        machine.teardown()
