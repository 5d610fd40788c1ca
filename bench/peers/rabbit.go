package main

import (
	"log"
	"net"
	"strconv"

	amqp "github.com/rabbitmq/amqp091-go"
	streams "github.com/rabbitmq/rabbitmq-stream-go-client/pkg/amqp"
	"github.com/rabbitmq/rabbitmq-stream-go-client/pkg/message"
	"github.com/rabbitmq/rabbitmq-stream-go-client/pkg/stream"
)

// perAck is the number of messages that a consumer acknowledges at once.
const perAck = 250

// ------------------------------------------------------------------------------------------ quorum queues

func newRabbit(addresses []string) system {
	arguments := amqp.Table{amqp.QueueTypeArg: amqp.QueueTypeQuorum}
	_, err := channelTo(addresses[0]).QueueDeclare(*topic, true, false, false, false, arguments)
	check(err)
	publisher := func(_ int, batch int, body []byte) func() {
		channel := channelTo(addresses[0])
		check(channel.Confirm(false))
		sent := amqp.Publishing{DeliveryMode: amqp.Persistent, Body: body}
		confirmations := make([]*amqp.DeferredConfirmation, batch)
		return func() {
			for n := range confirmations {
				var err error
				confirmations[n], err = channel.PublishWithDeferredConfirm("", *topic, false, false, sent)
				check(err)
			}
			for _, confirmation := range confirmations {
				if !confirmation.Wait() {
					log.Fatal("the server refused a message")
				}
			}
		}
	}
	consumer := func(_ int, acknowledged func(int)) { consumeQueue(addresses[0], nil, acknowledged) }
	return system{func() {}, publisher, consumer}
}

func channelTo(address string) *amqp.Channel {
	conn, err := amqp.Dial("amqp://guest:guest@" + address)
	check(err)
	channel, err := conn.Channel()
	check(err)
	return channel
}

func consumeQueue(address string, arguments amqp.Table, acknowledged func(int)) {
	channel := channelTo(address)
	check(channel.Qos(window, 0, false))
	deliveries, err := channel.Consume(*topic, "", false, false, false, false, arguments)
	check(err)
	go func() {
		pending := 0
		for delivery := range deliveries {
			if pending++; pending == perAck || len(deliveries) == 0 {
				check(delivery.Ack(true)) // and all before it
				acknowledged(pending)
				pending = 0
			}
		}
	}()
}

// ------------------------------------------------------------------------------------------ streams

// newStream publishes through the protocol of streams, at the first address, and consumes through AMQP 0-9-1, at the
// second one: RabbitMQ 3.10 stops to deliver to version 1.8 of the library for streams after some chunks.
func newStream(addresses []string) system {
	host, text, err := net.SplitHostPort(addresses[0])
	check(err)
	port, err := strconv.Atoi(text)
	check(err)
	options := stream.NewEnvironmentOptions().SetHost(host).SetPort(port).SetRPCTimeout(patience)
	environment, err := stream.NewEnvironment(options)
	check(err)
	known, err := environment.StreamExists(*topic)
	check(err)
	if !known {
		check(environment.DeclareStream(*topic, stream.NewStreamOptions()))
	}
	publisher := func(_ int, batch int, body []byte) func() {
		producer, err := environment.NewProducer(*topic, stream.NewProducerOptions())
		check(err)
		confirmed := producer.NotifyPublishConfirmation()
		return func() {
			messages := make([]message.StreamMessage, batch)
			for n := range messages {
				messages[n] = streams.NewMessage(body)
			}
			check(producer.BatchSend(messages))
			for missing := batch; missing > 0; {
				for _, status := range <-confirmed {
					if !status.IsConfirmed() {
						log.Fatalf("the server refused a message: %v", status.GetError())
					}
					missing--
				}
			}
		}
	}
	consumer := func(_ int, acknowledged func(int)) {
		consumeQueue(addresses[1], amqp.Table{"x-stream-offset": "first"}, acknowledged)
	}
	return system{func() {}, publisher, consumer}
}
