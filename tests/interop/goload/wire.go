package main

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"io"
	"log"
	"net"
	"strconv"
)

// The types of frames.
const (
	frameResponse = 0
	frameError    = 1
	frameMessage  = 2
)

var closeWait = []byte("CLOSE_WAIT")

var okFrame = []byte{0, 0, 0, 6, 0, 0, 0, frameResponse, 'O', 'K'}

func dial() net.Conn {
	conn, err := net.Dial("tcp", *addr)
	check(err)
	return conn
}

// connect dials and identifies.
func connect(settings map[string]any) net.Conn {
	said, err := json.Marshal(settings)
	check(err)
	conn := dial()
	write(conn, append(sized([]byte("  V2IDENTIFY\n"), len(said)), said...))
	expectOK(conn)
	return conn
}

// connectPublisher connects without heartbeats, so that an OK is all that ever comes.
func connectPublisher() net.Conn {
	return connect(map[string]any{"heartbeat_interval": -1})
}

// mostReady is the highest RDY that nsqd allows.
const mostReady = 2500

// subscribe connects a consumer that may have so many messages in flight.
func subscribe(topic, channel string, ready int, settings map[string]any) net.Conn {
	conn := connect(settings)
	write(conn, []byte("SUB "+topic+" "+channel+"\n"))
	expectOK(conn)
	write(conn, []byte("RDY "+strconv.Itoa(ready)+"\n"))
	return conn
}

// errClosed ends a consumer: the broker has answered CLS.
var errClosed = errors.New("the subscription is closed")

// frames reads what a broker sends to a consumer.
type frames struct {
	conn   net.Conn
	buffer []byte
	filled int
}

func newFrames(conn net.Conn) *frames {
	return &frames{conn: conn, buffer: make([]byte, 128*1024)}
}

// read reads once, and tells got of each message, which begins with its timestamp; it is valid until got returns.
func (f *frames) read(got func(message []byte)) error {
	n, err := f.conn.Read(f.buffer[f.filled:])
	if err != nil {
		return err
	}
	f.filled += n
	at := 0
	for f.filled-at >= 8 {
		end := at + 4 + int(binary.BigEndian.Uint32(f.buffer[at:]))
		if end > f.filled {
			if end-at > len(f.buffer) {
				f.buffer = append(f.buffer, make([]byte, end-at)...)
			}
			break
		}
		frame := f.buffer[at+8 : end]
		switch binary.BigEndian.Uint32(f.buffer[at+4:]) {
		case frameMessage:
			got(frame)
		case frameResponse:
			if bytes.Equal(frame, closeWait) {
				return errClosed
			}
			write(f.conn, []byte("NOP\n")) // it is a heartbeat
		case frameError:
			log.Fatalf("the broker answered: %s", frame)
		}
		at = end
	}
	f.filled = copy(f.buffer, f.buffer[at:f.filled])
	return nil
}

// consume finishes messages until got, which is told of each, returns false; a message begins with its timestamp.
// The FINs of all that one read brought leave together.
func consume(conn net.Conn, got func(message []byte) bool) {
	answers := make([]byte, 0, 64*1024)
	frames := newFrames(conn)
	for more := true; more; {
		answers = answers[:0]
		check(frames.read(func(message []byte) {
			answers = append(append(append(answers, "FIN "...), message[10:26]...), '\n')
			more = got(message)
		}))
		if len(answers) > 0 {
			write(conn, answers)
		}
	}
}

// request returns PUB of one message, or MPUB of several alike.
func request(topic string, body []byte, messages int) []byte {
	if messages == 1 {
		return append(sized([]byte("PUB "+topic+"\n"), len(body)), body...)
	}
	wire := sized([]byte("MPUB "+topic+"\n"), 4+messages*(4+len(body)))
	wire = sized(wire, messages)
	for i := 0; i < messages; i++ {
		wire = append(sized(wire, len(body)), body...)
	}
	return wire
}

// sized appends a size, or any other number of four bytes.
func sized(wire []byte, size int) []byte {
	return binary.BigEndian.AppendUint32(wire, uint32(size))
}

// expectOK reads one frame, which has to be an OK.
func expectOK(conn net.Conn) {
	var frame [10]byte
	_, err := io.ReadFull(conn, frame[:])
	check(err)
	if !bytes.Equal(frame[:], okFrame) {
		rest := make([]byte, 200)
		n, _ := conn.Read(rest)
		log.Fatalf("the broker answered: %q", append(frame[8:], rest[:n]...))
	}
}

// replies reads the answers of an HTTP connection.
type replies struct {
	reader *bufio.Reader
}

func newReplies(conn net.Conn) *replies {
	return &replies{bufio.NewReader(conn)}
}

// expectOK reads one answer, whose status has to be 200.
func (r *replies) expectOK() {
	status, err := r.reader.ReadSlice('\n')
	check(err)
	if !bytes.HasPrefix(status, []byte("HTTP/1.1 200 ")) {
		log.Fatalf("the broker answered: %s", status)
	}
	length := 0
	for {
		header, err := r.reader.ReadSlice('\n')
		check(err)
		if len(header) <= 2 {
			break
		}
		if name, value, _ := bytes.Cut(header, []byte(":")); bytes.EqualFold(name, []byte("Content-Length")) {
			length, err = strconv.Atoi(string(bytes.TrimSpace(value)))
			check(err)
		}
	}
	_, err = r.reader.Discard(length)
	check(err)
}
