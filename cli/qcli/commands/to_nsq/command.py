"""`qcli to-nsq`: copies topics to other brokers."""

import click

from ...framework.errors import ExitCode
from ...framework.go_flags import GoFlagsCommand
from ...framework.options import option, options_as, output_format, several
from ...framework.params import Integer, duration, http_address, tcp_address, topic_name
from ...records.jobs import CopyRecord
from ..shared.client_options import producer_option
from ..shared.consuming import consuming_options
from .options import DESTINATION_OPTION, MODES, NOT_JSON, NsqCommand, condition, fields, pattern

DESTINATION, FILTERS, OUTPUT = "Where to", "Filters", "Output"


@click.command(
    "to-nsq",
    cls=GoFlagsCommand,
    short_help="Copy topics to other brokers (mirror).",
    examples={
        "mirror a topic to another broker": f"qcli to-nsq clicks {DESTINATION_OPTION} 10.0.0.2:4150",
        "mirror all topics, also those created later": "qcli to-nsq --topic-pattern . --lookupd-http-address "
        f"127.0.0.1:4161 {DESTINATION_OPTION} 10.0.0.2:4150",
        "copy only errors, with two fields": f"qcli to-nsq logs {DESTINATION_OPTION} 127.0.0.1:4150 "
        "--destination-topic errors --where level=error --fields time,message",
        "copy what is there, then end": f"qcli to-nsq clicks {DESTINATION_OPTION} 10.0.0.2:4150 --no-follow",
        "spread a topic over two brokers": f"qcli to-nsq clicks {DESTINATION_OPTION} 10.0.0.2:4150,10.0.0.3:4150 "
        "--mode round-robin",
        "show the lag as JSON": f"qcli to-nsq clicks {DESTINATION_OPTION} 10.0.0.2:4150 --format json "
        "--status-interval 10s | jq .lag",
    },
    exits={
        ExitCode.OK: "With --no-follow: the messages that were there at the start are copied.",
        ExitCode.FAILURE: "A destination refuses a message, a topic would be copied to itself, a destination lacks "
        "messages that the channel has passed, or a broker refused.",
        ExitCode.PARTIAL: "A source's log is a copy of another one, and both have got messages since.",
        ExitCode.UNREACHABLE: "At the start, no source or no destination answers. Later, the command waits for them.",
        ExitCode.INTERRUPTED: "Interrupted (SIGINT). The next run continues without a gap.",
        ExitCode.TERMINATED: "Terminated (SIGTERM). The next run continues without a gap.",
    },
    details={
        "Delivery": "From a broker of this project to others of this project, each message is stored exactly once, "
        "also if the command or a broker is killed and started again: the source's log is read by position, and the "
        "destination stores the position with the messages. Only a power cut of a source with --sync=interval, which "
        "loses its last messages, can make copies. The command keeps no state; the channel shows the "
        "position at the source, its depth is the lag. Do not change --channel: it is a part of the name under which "
        "the destination knows the position. Two commands with the same options may run at the same time "
        "if there is one destination. If a source "
        "or a destination is an nsqd, or with --at-least-once, messages are finished after they are stored: none is "
        "lost, and some may be stored twice.",
        "Several destinations": "Each message goes to one of them. hostpool: in turn, without those that failed; a "
        "failed one is tried again after 30 s, 60 s and so on. epsilon-greedy: mostly the fast ones. round-robin: in "
        "turn. For exactly once, all must answer at the start, and messages that one may have stored wait for it; with "
        "--at-least-once they go to another one.",
        "Conditions": "FIELD=VALUE, FIELD!=VALUE, <, <=, >, >=; FIELD: the field exists; !FIELD: it does not. Names of "
        "nested fields are separated by dots, as in user.id; write a dot in a name as \\\\. . Numbers are compared by "
        "value, with all digits. A string equals a value with the same text; VALUE in double quotes is only a string. "
        "A message without the field meets none but !FIELD. With several --where, all must be met.",
        "Fields": "With --fields a message is reduced to an object with these fields. Nested fields stay nested. The "
        "text of values does not change, so that large integers and all digits of numbers are kept.",
        "Bodies that are not JSON": "With --where or --fields, bodies that are not JSON objects go to the topic "
        "DESTINATION-TOPIC.not-json, or the one of --not-json-topic. With --not-json pass they are copied unchanged, "
        "with drop they are left out, as nsq_to_nsq does. They are counted and reported in each case.",
        "What is copied": "Bodies. Message ids and timestamps are new. From a log, deferred messages keep the rest of "
        "their delay; from a channel, they are copied when they are due. Channels are not copied: create those of the "
        "destination before the first copy, or they begin with the next one. The topic is created by the first "
        "message.",
        "Loops": "The command refuses to copy a topic to itself, also by another address of the same broker. A pattern "
        "does not find --destination-topic. It does not see a second mirror that copies the messages back.",
        "JSON": "With --format json there is an object per topic and broker at each --status-interval: time, topic, "
        "broker, copied, copied_bytes, dropped, not_json, per_second, lag (null: unknown) and exactly_once.",
        "nsq_to_nsq": "The options of nsq_to_nsq have the same names, with one dash or two. --require-json-field, "
        "--require-json-value and --whitelist-json-field are --where and --fields with names without nesting.",
    },
)
@consuming_options("nsq_to_nsq", max_in_flight=2500)  # a request costs the same for all messages in flight
@several(
    DESTINATION,
    DESTINATION_OPTION,
    "destination_tcp_addresses",
    type=tcp_address,
    metavar="HOST:PORT",
    help="Copy to these brokers. Several: with commas, or repeat the option.",
)
@several(
    DESTINATION,
    "--destination-nsqd-http-address",
    "destination_http_addresses",
    type=http_address,
    metavar="[https://]HOST:PORT|PATH",
    help="The HTTP addresses of the same brokers, in the same order; by default the port after the TCP port.",
)
@option(
    DESTINATION,
    "--destination-topic",
    type=topic_name,
    metavar="TOPIC",
    help="Copy all topics to this one. By default, each is copied to the topic of the same name.",
)
@option(
    DESTINATION,
    "--mode",
    type=click.Choice(MODES),
    default=MODES[0],
    help="How several destinations share the messages: see 'man qcli-to-nsq'.",
)
@option(
    DESTINATION,
    "--producer-opt",
    "producer_opts",
    type=producer_option,
    multiple=True,
    metavar="NAME,VALUE",
    brief=True,
    help="Set an option of the Go client by its name, for destinations. They get the options for TLS and the secret of "
    "the sources, unless this sets others: tls_v1,false or auth_secret_file,FILE.",
)
@option(
    DESTINATION,
    "--allow-gaps",
    "allows_gaps",
    is_flag=True,
    help="Go on if a channel has passed messages that the destination lacks, and leave them out. By default the "
    "command ends before it copies newer ones.",
)
@option(
    DESTINATION,
    "--without-headers",
    is_flag=True,
    help="Copy bodies only. An nsqd, which has no headers, refuses others.",
)
@option(
    DESTINATION,
    "--follow/--no-follow",
    default=True,
    help="Run until interrupted, or end when the messages are copied that were there at the start.",
)
@option(
    FILTERS,
    "--match",
    "matching",
    type=pattern,
    metavar="REGEX",
    help="Copy only messages whose body contains a match (RE2).",
)
@option(
    FILTERS,
    "--where",
    "conditions",
    type=condition,
    multiple=True,
    metavar="CONDITION",
    help="Copy only JSON messages that meet this: level=error, user.age>=18, user.name, !test.",
)
@option(
    FILTERS,
    "--fields",
    "field_lists",
    type=fields,
    multiple=True,
    metavar="FIELD,...",
    help="Copy only these fields of JSON messages: id,user.name.",
)
@option(
    FILTERS,
    "--not-json",
    type=click.Choice(NOT_JSON),
    default=NOT_JSON[0],
    help="With --where or --fields, what to do with other bodies than JSON objects.",
)
@option(
    FILTERS,
    "--not-json-topic",
    type=topic_name,
    metavar="TOPIC",
    brief=True,
    help="The topic for such bodies. The default is the name of the destination topic and .not-json.",
)
@option(
    FILTERS,
    "--require-json-field",
    default="",
    metavar="NAME",
    hidden=True,
    help="--where with a name without nesting.",
)
@option(
    FILTERS,
    "--require-json-value",
    default="",
    metavar="TEXT",
    hidden=True,
    help="The value of --require-json-field.",
)
@option(
    FILTERS,
    "--whitelist-json-field",
    "whitelist_json_fields",
    multiple=True,
    metavar="NAME",
    hidden=True,
    help="--fields with a name without nesting.",
)
@output_format(
    "text: write the status to standard error. json: write it to standard output, an object per topic and broker.",
    "text",
    "json",
    records=[CopyRecord],
)
@option(
    OUTPUT,
    "--status-interval",
    "status_interval_ms",
    type=duration,
    default="1m",
    help="Write the status at this interval; 0: never.",
)
@option(
    OUTPUT,
    "--status-every",
    type=Integer(min=0),
    default=0,
    hidden=True,
    help="Also write the status after so many messages.",
)
@option(OUTPUT, "--quiet", "-q", is_flag=True, help="Print warnings and errors only.")
@options_as(NsqCommand)
def command(options: NsqCommand) -> int:
    """Copy the messages of topics to other brokers until interrupted.

    Between brokers of this project each message is stored exactly once, over kills and restarts of all three. With an
    nsqd on either side, at least once. Filters select messages by their bodies, and fields of JSON bodies.
    """
    copying = options.options()

    from .run import run

    return run(copying, options)
