package main

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"log"
	"math/rand"
	"net"
	"os"
	"strings"
	"sync"
	"time"
)

// What mixed publishes. All random choices have fixed seeds, so that every broker gets the same messages in the same
// requests, and the same ones of them back.
const (
	smallestBody, largestBody = 50, 64 * 1024

	// Shares of the messages; the others are published with MPUB of 2 to mostTogether, all sizes alike.
	sharePub, shareDpub = 0.25, 0.02
	mostTogether        = 40

	shareRequeued      = 0.05 // of the deliveries of a message to a channel; half of them with a delay
	leastMs, longestMs = 10, 200
)

// A consumer keeps up to half of its messages back, but no more than this, and answers a random choice of them in random
// order, as with handlers that take different times. If nothing comes for a while, it answers all.
const (
	mostKept = 8
	patience = 5 * time.Millisecond
)

const notRequeued = -1

// filling is what bodies have after their number.
var filling = func() []byte {
	content := make([]byte, largestBody)
	_, _ = rand.New(rand.NewSource(1)).Read(content)
	return content
}()

// ledger notes what is finished of one channel.
type ledger struct {
	name      string
	sizes     []int // of the topic's messages, by number
	requeueMs []int // by number: the delay of the message's only REQ, or notRequeued

	lock       sync.Mutex
	finished   []bool // by number
	left       int    // messages that are not finished yet
	deliveries int
	done       chan struct{} // closed when nothing is left
}

// mixed publishes bodies of very different sizes to all topics with PUB, MPUB and DPUB, while consumers finish or
// requeue what comes, out of order, until every channel has finished every message.
func mixed() found {
	each := *count / *topics
	var sizes [][]int
	var ledgers []*ledger
	var consumers []net.Conn
	var consuming sync.WaitGroup
	for t := 0; t < *topics; t++ {
		sizes = append(sizes, bodySizes(t, each))
		for c := 0; c < *channels; c++ {
			own := newLedger(topicName(t)+"/"+channelName(c), sizes[t], len(ledgers))
			ledgers = append(ledgers, own)
			for n := 0; n < *perChannel; n++ {
				conn := subscribe(topicName(t), channelName(c), *ready, map[string]any{"output_buffer_timeout": leastBufferingMs})
				choice := rand.New(rand.NewSource(int64(len(consumers))))
				consumers = append(consumers, conn)
				consuming.Add(1)
				go func() {
					defer consuming.Done()
					answerMixed(conn, own, choice)
				}()
			}
		}
	}
	whatIsMissing = func() string { return missing(ledgers) }
	requests := make([]*requestList, *connections)
	deferred := 0
	for p := range requests {
		requests[p] = mixedRequests(p, sizes)
		deferred += requests[p].deferred
	}

	begin := time.Now()
	var publishing sync.WaitGroup
	for _, own := range requests {
		publishing.Add(1)
		go func(own *requestList) {
			defer publishing.Done()
			own.publish()
		}(own)
	}
	publishing.Wait()
	published := time.Since(begin)
	for _, own := range ledgers {
		<-own.done
	}
	for _, conn := range consumers {
		write(conn, []byte("CLS\n"))
	}
	consuming.Wait() // until the broker has answered CLS, and so has seen all answers before it
	result := found{
		Messages:       each * *topics,
		Seconds:        time.Since(begin).Seconds(),
		PublishSeconds: published.Seconds(),
		Deferred:       deferred,
	}
	for _, own := range ledgers {
		result.Deliveries += own.deliveries
		for _, delayMs := range own.requeueMs {
			if delayMs != notRequeued {
				result.Requeued++
			}
		}
	}
	for _, own := range sizes {
		for _, size := range own {
			result.BodyBytes += size
		}
	}
	return result
}

// bodySizes draws the sizes of a topic's bodies from a Pareto distribution with exponent 1, within the bounds: half
// of them have less than 100 bytes, one in 100 has more than 4,600, and the mean is about 350.
func bodySizes(t, each int) []int {
	random := rand.New(rand.NewSource(int64(t)))
	sizes := make([]int, each)
	for n := range sizes {
		sizes[n] = int(smallestBody / (1 - random.Float64()*(1-float64(smallestBody)/largestBody)))
	}
	return sizes
}

// newLedger chooses the messages that the channel requeues.
func newLedger(name string, sizes []int, seed int) *ledger {
	random := rand.New(rand.NewSource(int64(seed)))
	own := &ledger{
		name:      name,
		sizes:     sizes,
		requeueMs: make([]int, len(sizes)),
		finished:  make([]bool, len(sizes)),
		left:      len(sizes),
		done:      make(chan struct{}),
	}
	for n := range own.requeueMs {
		own.requeueMs[n] = notRequeued
		if random.Float64() < shareRequeued {
			own.requeueMs[n] = random.Intn(2) * delayMs(random)
		}
	}
	return own
}

func delayMs(random *rand.Rand) int {
	return leastMs + random.Intn(longestMs-leastMs+1)
}

// ------------------------------------------------------------------------------------------------ publishing

// requestList is what one connection publishes, all of it built before the clock starts.
type requestList struct {
	wire     []byte
	ends     []int // of each request
	deferred int   // messages
}

// mixedRequests returns the requests of a connection: those to all messages of its topics, which take turns.
func mixedRequests(p int, sizes [][]int) *requestList {
	random := rand.New(rand.NewSource(int64(p)))
	made := &requestList{}
	parts := share(p)
	next, end := make([]int, len(parts)), make([]int, len(parts))
	for i, part := range parts {
		each := len(sizes[part.number])
		next[i], end[i] = each*part.nth/part.of, each*(part.nth+1)/part.of
	}
	for more := true; more; {
		more = false
		for i, part := range parts {
			if next[i] < end[i] {
				next[i] += made.add(part, sizes[part.number], next[i], end[i], random)
				more = true
			}
		}
	}
	return made
}

// add draws one request, with messages from number next on, and returns how many it has.
func (made *requestList) add(part part, sizes []int, next, end int, random *rand.Rand) int {
	const meanTogether = (2 + mostTogether) / 2
	const shareMpub = (1 - sharePub - shareDpub) / meanTogether
	messages := 1
	switch kind := random.Float64() * (sharePub + shareDpub + shareMpub); {
	case kind < sharePub || end-next == 1:
		made.wire = append(made.wire, "PUB "+part.topic+"\n"...)
	case kind < sharePub+shareDpub:
		made.wire = fmt.Appendf(made.wire, "DPUB %s %d\n", part.topic, delayMs(random))
		made.deferred++
	default:
		messages = min(2+random.Intn(mostTogether-1), end-next)
		size := 4
		for _, body := range sizes[next : next+messages] {
			size += 4 + body
		}
		made.wire = append(made.wire, "MPUB "+part.topic+"\n"...)
		made.wire = sized(sized(made.wire, size), messages)
	}
	for number := next; number < next+messages; number++ {
		made.wire = sized(made.wire, sizes[number])
		made.wire = sized(made.wire, number)
		made.wire = append(made.wire, filling[:sizes[number]-4]...)
	}
	made.ends = append(made.ends, len(made.wire))
	return messages
}

// publish sends one request after the other, each when the one before it has its OK.
func (made *requestList) publish() {
	conn := connectPublisher()
	start := 0
	for _, end := range made.ends {
		write(conn, made.wire[start:end])
		expectOK(conn)
		start = end
	}
	conn.Close()
}

// ------------------------------------------------------------------------------------------------ consuming

// delivered is a message that is not answered yet.
type delivered struct {
	id      [16]byte
	number  int
	requeue bool
}

// answerMixed finishes or requeues messages until the broker has closed the subscription.
func answerMixed(conn net.Conn, own *ledger, choice *rand.Rand) {
	var waiting []delivered
	var answers []byte
	got := func(message []byte) {
		waiting = append(waiting, own.read(message))
	}
	answer := func(keep int) {
		choice.Shuffle(len(waiting), func(i, j int) { waiting[i], waiting[j] = waiting[j], waiting[i] })
		answers = answers[:0]
		for _, each := range waiting[keep:] {
			if each.requeue {
				answers = append(append(answers, "REQ "...), each.id[:]...)
				answers = fmt.Appendf(answers, " %d\n", own.requeueMs[each.number])
			} else {
				answers = append(append(append(answers, "FIN "...), each.id[:]...), '\n')
			}
		}
		write(conn, answers)
		own.note(waiting[keep:])
		waiting = waiting[:keep]
	}
	frames := newFrames(conn)
	for {
		var deadline time.Time
		if len(waiting) > 0 {
			deadline = time.Now().Add(patience)
		}
		check(conn.SetReadDeadline(deadline))
		switch err := frames.read(got); {
		case err == errClosed:
			return
		case errors.Is(err, os.ErrDeadlineExceeded):
			answer(0)
		default:
			check(err)
			if keep := min(mostKept, len(waiting)/2); len(waiting) > keep {
				answer(keep)
			}
		}
	}
}

// read checks a message, which begins with its timestamp, against what was published.
func (own *ledger) read(message []byte) delivered {
	attempts, body := binary.BigEndian.Uint16(message[8:]), message[26:]
	number := -1
	if len(body) >= smallestBody {
		number = int(binary.BigEndian.Uint32(body))
	}
	if number < 0 || number >= len(own.sizes) || len(body) != own.sizes[number] || !bytes.Equal(body[4:], filling[:len(body)-4]) {
		log.Fatalf("%s delivered a message of %d bytes that was not published: %.60q", own.name, len(body), body)
	}
	one := delivered{number: number, requeue: attempts == 1 && own.requeueMs[number] != notRequeued}
	copy(one.id[:], message[10:26])
	return one
}

// note counts messages whose answers are sent.
func (own *ledger) note(answered []delivered) {
	own.lock.Lock()
	defer own.lock.Unlock()
	own.deliveries += len(answered)
	for _, each := range answered {
		if !each.requeue && !own.finished[each.number] {
			own.finished[each.number] = true
			own.left--
			if own.left == 0 {
				close(own.done)
			}
		}
	}
}

// missing says which channels have not finished all messages.
func missing(ledgers []*ledger) string {
	var lines []string
	for _, own := range ledgers {
		own.lock.Lock()
		for number, finished := range own.finished {
			if !finished {
				lines = append(lines, fmt.Sprintf("%s has not finished %d messages, the first is number %d", own.name, own.left, number))
				break
			}
		}
		own.lock.Unlock()
	}
	return strings.Join(lines, "; ")
}
