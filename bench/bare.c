/* The least that a server does for PUB and MPUB, which it appends to a file, and for consumers. Linux, one thread.
 *
 *     bare PORT FILE [sync]
 *
 * Each round serves all clients that have sent something, with one write. With `sync`, the file is synced before the
 * answers, once no client has more to send; zeros are written ahead of small writes, as the broker's log does. Like the broker, it
 * busy-waits for 50 us before it sleeps. It has no topics, checksums, message ids, limits or errors: a server with them
 * takes more. A client must wait for its OK, and a request has at most 4 MiB. The address is 127.0.0.1.
 *
 * A consumer gets messages of 200 bytes from memory, as many as its RDY and its FINs allow. They differ by their ids,
 * and the ids in FINs are not looked up.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { CLIENTS = 1024, REQUEST = 4 << 20, RECORD_HEADER = 60, AHEAD = 131072, SMALL = 32768 };
enum { BODY = 200, ID = 16, FRAME = 4 + 4 + 8 + 2 + ID + BODY, FRAMES = 4096 };

struct client {
    int fd;
    int answers; /* that it waits for */
    int ready;   /* how many messages it may be sent */
    size_t filled;
    char received[REQUEST];
};

static const char ok[] = {0, 0, 0, 6, 0, 0, 0, 0, 'O', 'K'};
static char *records, zeros[AHEAD];
static size_t gathered, room; /* bytes in `records`, and allocated */
static char frames[FRAMES][FRAME];
static uint64_t messages; /* sent so far */

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static double now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec * 1e-9;
}

/* Wait for clients: busily for a moment, unless `at_once`, which does not wait. Returns their number. */
static int readable(int epoll, struct epoll_event *events, int at_once) {
    double until_s = now_s() + 50e-6;
    int count;
    do {
        count = epoll_wait(epoll, events, CLIENTS, 0);
    } while (!count && !at_once && now_s() < until_s);
    return count || at_once ? count : epoll_wait(epoll, events, CLIENTS, -1);
}

/* Send a consumer as many messages as it may have. */
static void deliver(struct client *client) {
    static const char digits[] = "0123456789abcdef";
    while (client->ready > 0) {
        int count = client->ready < FRAMES ? client->ready : FRAMES;
        for (int n = 0; n < count; n++) {
            char *frame = frames[n], *id = frame + FRAME - BODY - ID;
            uint64_t number = ++messages;
            frame[2] = (FRAME - 4) >> 8;
            frame[3] = (char)(FRAME - 4);
            frame[7] = 2; /* a message; the time stamp is 0 */
            frame[17] = 1; /* the first attempt */
            for (int digit = ID; digit--; number >>= 4)
                id[digit] = digits[number & 15];
        }
        if (send(client->fd, frames, (size_t)count * FRAME, MSG_NOSIGNAL) < 0)
            return;
        client->ready -= count;
    }
}

/* Take the whole commands that a client has sent. */
static void execute(struct client *client) {
    size_t at = client->filled >= 4 && !memcmp(client->received, "  V2", 4) ? 4 : 0;
    char *line_end;
    while ((line_end = memchr(client->received + at, '\n', client->filled - at))) {
        char *command = client->received + at, *body = line_end + 5;
        uint32_t size;
        if (!memcmp(command, "FIN ", 4) || !memcmp(command, "RDY ", 4) || !memcmp(command, "SUB ", 4)) {
            client->ready += command[0] == 'F';
            client->answers += command[0] == 'S';
            if (command[0] == 'R')
                client->ready = atoi(command + 4);
            at = line_end + 1 - client->received;
            continue;
        }
        if (body > client->received + client->filled)
            break;
        memcpy(&size, line_end + 1, 4);
        size = ntohl(size);
        if (size > REQUEST || body + size > client->received + client->filled)
            break;
        if (!memcmp(command, "PUB ", 4) || !memcmp(command, "MPUB ", 5)) {
            if (gathered + RECORD_HEADER + size > room && !(records = realloc(records, room += 2 * REQUEST)))
                fail("realloc");
            memset(records + gathered, 1, RECORD_HEADER);
            memcpy(records + gathered + RECORD_HEADER, body, size);
            gathered += RECORD_HEADER + size;
        }
        client->answers++;
        at = body + size - client->received;
    }
    client->filled -= at;
    memmove(client->received, client->received + at, client->filled);
}

int main(int count, char **words) {
    if (count < 3)
        return fprintf(stderr, "usage: bare PORT FILE [sync]\n"), 2;
    int syncs = count > 3, one = 1, epoll = epoll_create1(0), listener = socket(AF_INET, SOCK_STREAM, 0);
    int file = open(words[2], O_CREAT | O_RDWR | O_TRUNC, 0600);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(atoi(words[1]))};
    struct epoll_event events[CLIENTS], event = {.events = EPOLLIN};
    struct client *waiting[CLIENTS];
    int waiters = 0;
    off_t end = 0, zeros_to = 0;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (file < 0)
        fail(words[2]);
    if (bind(listener, (struct sockaddr *)&address, sizeof address) || listen(listener, CLIENTS))
        fail("listen");
    epoll_ctl(epoll, EPOLL_CTL_ADD, listener, &event);
    for (;;) {
        int found = readable(epoll, events, waiters > 0);
        for (int n = 0; n < found; n++) {
            struct client *client = events[n].data.ptr;
            if (!client) {
                if (!(client = malloc(sizeof *client)))
                    fail("malloc");
                client->answers = client->ready = client->filled = 0;
                client->fd = accept(listener, NULL, NULL);
                setsockopt(client->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
                event.data.ptr = client;
                epoll_ctl(epoll, EPOLL_CTL_ADD, client->fd, &event);
                continue;
            }
            ssize_t size = recv(client->fd, client->received + client->filled, REQUEST - client->filled, 0);
            if (size <= 0) {
                close(client->fd);
                free(client);
                continue;
            }
            client->filled += size;
            execute(client);
            deliver(client);
            if (client->answers)
                waiting[waiters++] = client;
        }
        if (syncs && found && waiters)
            continue; /* others may have sent, too */
        if (gathered && pwrite(file, records, gathered, end) != (ssize_t)gathered)
            fail(words[2]);
        end += gathered;
        if (syncs && gathered <= SMALL && end > zeros_to) {
            if (pwrite(file, zeros, AHEAD, end) != AHEAD)
                fail(words[2]);
            zeros_to = end + AHEAD;
        }
        if (syncs && gathered && fdatasync(file))
            fail(words[2]);
        gathered = 0;
        for (int n = 0; n < waiters; n++)
            for (; waiting[n]->answers; waiting[n]->answers--)
                send(waiting[n]->fd, ok, sizeof ok, MSG_NOSIGNAL);
        waiters = 0;
    }
}
