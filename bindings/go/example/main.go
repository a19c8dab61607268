// Connections to a D2TP server, a server of its own and a page through the proxy. bindings/tests/languages/fetch.rs runs it.
//
//	example SERVER PROXY URL
//
// And a connection that is opened again, beside an agent (bindings/tests/languages/reopen.rs):
//
//	example keep SERVER FILE      is killed when it has said "kept"; FILE: the token
//	example again FILE
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	neturl "net/url"
	"os"
	"strings"
	"syscall"
	"time"

	d2tp "github.com/cedos/cedos/bindings/go"
)

func need(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

func keep(server, path string) {
	inner, err := (&d2tp.Dialer{Persist: d2tp.PersistOpen}).Dial("tcp", server)
	need(err)
	conn := inner.(*d2tp.Conn)
	_, err = conn.Write([]byte("first second"))
	need(err)
	hear(conn, "first ")
	token, err := conn.Token()
	need(err)
	need(os.WriteFile(path, token, 0o600))
	// That leaves it, to who comes after this process.
	need(conn.Close())
	_, err = d2tp.Reopen(token)
	if !errors.Is(err, syscall.EBUSY) {
		log.Fatal("it is ours: ", err)
	}
	fmt.Println("kept:", err)
	_, _ = io.ReadAll(os.Stdin)
}

func again(path string) {
	token, err := os.ReadFile(path)
	need(err)
	conn, err := d2tp.Reopen(token)
	need(err)
	hear(conn, "second")
	same, err := conn.Token()
	need(err)
	if string(same) != string(token) {
		log.Fatal("another token")
	}
	_, err = conn.Write([]byte("third"))
	need(err)
	hear(conn, "third")
	need(conn.Flush(time.Minute))
	info, err := conn.Info()
	need(err)
	if info.BytesAcked != 17 {
		log.Fatal("not all of both: ", info)
	}
	need(conn.End())
	_, err = d2tp.Reopen(token)
	if !errors.Is(err, syscall.ENOENT) {
		log.Fatal("after its end: ", err)
	}
	fmt.Println("ended:", err)
}

func hear(conn net.Conn, words string) {
	heard := make([]byte, len(words))
	_, err := io.ReadFull(conn, heard)
	need(err)
	if string(heard) != words {
		log.Fatalf("%q instead of %q", heard, words)
	}
}

// known is what only D2TP knows of a connection, and may be told.
func known(conn *d2tp.Conn) {
	_, err := conn.Write([]byte("known"))
	need(err)
	need(conn.Flush(time.Minute))
	hear(conn, "known")
	info, err := conn.Info()
	need(err)
	if info.State != d2tp.Connected || info.BytesAcked != 5 || info.BytesReceived != 5 || len(info.Paths) == 0 {
		log.Fatal("info: ", info)
	}
	if info.Slack <= 0 || info.Slack > time.Minute || info.Paths[0].State != d2tp.Works {
		log.Fatal("info: ", info)
	}
	need(conn.Finish(0))
	need(conn.SetSize(10))
	need(conn.SetPolicy(d2tp.FreeOnly))
	need(conn.SetBudget(0))
	need(conn.SetIfLate(d2tp.Fail))
	need(conn.SetBuffer(d2tp.Buffer{Low: 2_000, High: 20_000, Millis: true}))
	if err := conn.SetBuffer(d2tp.Buffer{Low: 2, High: 1}); !errors.Is(err, syscall.EINVAL) {
		log.Fatal("low above high: ", err)
	}
	if info, err = conn.Info(); err != nil || info.Slack >= 0 {
		log.Fatal("a deadline is left: ", info, err)
	}
	if token, err := conn.Token(); err != nil || token != nil {
		log.Fatal("it is not kept: ", err)
	}
	need(d2tp.NetworkChanged())
	for i := 0; i < 2; i++ {
		release, err := d2tp.AcquireDLock()
		need(err)
		release()
		release()
	}
	fmt.Println("known ok")
}

// serve answers by HTTP over D2TP, to a client of the same.
func serve() {
	listener, err := d2tp.Listen("tcp", "127.0.0.1:0")
	need(err)
	where := listener.Addr().String()
	if _, err := d2tp.Listen("tcp", strings.Split(strings.TrimPrefix(where, "d2tp://"), "/")[0]); !errors.Is(err, syscall.EADDRINUSE) {
		log.Fatal("it is taken: ", err)
	}
	done := make(chan error)
	go func() {
		done <- http.Serve(listener, http.HandlerFunc(func(answer http.ResponseWriter, asked *http.Request) {
			if !strings.HasPrefix(asked.RemoteAddr, "127.0.0.1:") {
				log.Fatal("from nowhere: ", asked.RemoteAddr)
			}
			fmt.Fprint(answer, "by D2TP")
		}))
	}()
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&d2tp.Dialer{}).DialContext(ctx, "tcp", where)
	}
	client := http.Client{Transport: &http.Transport{DialContext: dial}}
	page, err := client.Get("http://any.example/")
	need(err)
	body, err := io.ReadAll(page.Body)
	need(err)
	need(listener.Close())
	if err := <-done; !errors.Is(err, net.ErrClosed) {
		log.Fatal("no end: ", err)
	}
	if err := listener.Close(); !errors.Is(err, net.ErrClosed) {
		log.Fatal("closed twice: ", err)
	}
	fmt.Println("listen ok:", string(body))
}

// late is an answer that is not whole by the deadline.
func late() {
	listener, err := d2tp.Listen("tcp", "127.0.0.1:0")
	need(err)
	go func() {
		_ = http.Serve(listener, http.HandlerFunc(func(answer http.ResponseWriter, asked *http.Request) {
			fmt.Fprint(answer, "the beginning")
			answer.(http.Flusher).Flush()
			<-asked.Context().Done()
		}))
	}()
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&d2tp.Dialer{Deadline: 2 * time.Second}).DialContext(ctx, "tcp", listener.Addr().String())
	}
	client := http.Client{Transport: &http.Transport{DialContext: dial}}
	page, err := client.Get("http://any.example/")
	need(err)
	_, err = io.ReadAll(page.Body)
	var timed net.Error
	if !errors.As(err, &timed) || !timed.Timeout() {
		log.Fatal("no timeout: ", err)
	}
	need(listener.Close())
}

// alone is what a connection that is to be kept hears where nobody keeps it.
func alone(server string) {
	for _, attempt := range []func() error{
		func() error { _, err := d2tp.Reopen(make([]byte, d2tp.TokenBytes)); return err },
		func() error { _, err := (&d2tp.Dialer{Persist: d2tp.PersistOpen}).Dial("tcp", server); return err },
	} {
		err := attempt()
		if !errors.Is(err, syscall.EOPNOTSUPP) || !strings.Contains(err.Error(), "start `cedos agent`") {
			log.Fatal("there is no agent: ", err)
		}
	}
	fmt.Println("alone ok")
}

func main() {
	time.AfterFunc(2*time.Minute, func() { log.Fatal("it takes too long") })
	switch os.Args[1] {
	case "keep":
		keep(os.Args[2], os.Args[3])
		return
	case "again":
		again(os.Args[2])
		return
	}
	server, proxy, url := os.Args[1], os.Args[2], os.Args[3]
	dialer := d2tp.Dialer{Deadline: time.Minute, Policy: d2tp.FreeOnly}
	inner, err := dialer.Dial("tcp", server)
	need(err)
	conn := inner.(*d2tp.Conn)
	message := make([]byte, 300_000)
	for i := range message {
		message[i] = byte(i)
	}
	go func() {
		_, err := conn.Write(message)
		need(err)
		need(conn.CloseWrite())
	}()
	answer, err := io.ReadAll(conn)
	need(err)
	if string(answer) != string(message) {
		log.Fatalf("%d bytes came back", len(answer))
	}
	need(conn.Close())
	dialer.Buffer = d2tp.Buffer{Low: 2, High: 1}
	if _, err := dialer.Dial("tcp", server); !errors.Is(err, syscall.EINVAL) {
		log.Fatal("low above high: ", err)
	}
	dialer.Buffer = d2tp.Buffer{Low: 2_000, High: 20_000, Millis: true}
	fmt.Println("conn ok")

	// Deadlines of Go's own, by its poller, which waits for no flush.
	idle, err := dialer.Dial("tcp", server)
	need(err)
	known(idle.(*d2tp.Conn))
	need(idle.SetReadDeadline(time.Now().Add(10 * time.Millisecond)))
	if _, err := idle.Read(answer); !errors.Is(err, os.ErrDeadlineExceeded) {
		log.Fatal("no timeout: ", err)
	}
	// And D2TP's, which ends the connection.
	need(idle.SetReadDeadline(time.Time{}))
	need(idle.(*d2tp.Conn).Finish(time.Second))
	_, err = io.Copy(io.Discard, idle)
	var why *d2tp.Error
	var timed net.Error
	if !errors.As(err, &why) || !errors.Is(err, syscall.ETIME) || !errors.As(err, &timed) || !timed.Timeout() {
		log.Fatal("no end: ", err)
	}
	fmt.Println("deadline ok:", why.Words)

	serve()
	late()
	alone(server)

	through := d2tp.Dialer{Proxy: proxy, Deadline: time.Minute}
	client := http.Client{Transport: &http.Transport{DialContext: through.DialContext}}
	page, err := client.Get(url)
	need(err)
	body, err := io.ReadAll(page.Body)
	need(err)
	fmt.Println("http ok:", string(body))

	// An address of IPv6 in numbers goes to the proxy as any other; what it makes of it is its own.
	six, err := neturl.Parse(url)
	need(err)
	six.Host = net.JoinHostPort("::1", six.Port())
	if six.Port() == "" {
		six.Host = "[::1]"
	}
	if page, err = client.Get(six.String()); err != nil {
		fmt.Println("ipv6 refused:", err)
	} else {
		body, err = io.ReadAll(page.Body)
		need(err)
		fmt.Println("ipv6 ok:", string(body))
	}

	_, err = through.Dial("tcp", "nobody.example:80")
	if !errors.Is(err, syscall.EHOSTUNREACH) {
		log.Fatal("not unreachable: ", err)
	}
	fmt.Println("refused:", err)
}
