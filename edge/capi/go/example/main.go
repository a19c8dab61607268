// A connection to a D2TP server and a page through the proxy. tests/languages.rs runs it.
//
//	example SERVER PROXY URL
package main

import (
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"os"
	"syscall"
	"time"

	d2tp "github.com/cedos/cedos/edge/capi/go"
)

func need(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

func main() {
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

	// Deadlines of Go's own, by its poller.
	idle, err := dialer.Dial("tcp", server)
	need(err)
	need(idle.SetReadDeadline(time.Now().Add(10 * time.Millisecond)))
	if _, err := idle.Read(answer); !errors.Is(err, os.ErrDeadlineExceeded) {
		log.Fatal("no timeout: ", err)
	}
	// And D2TP's, which ends the connection.
	need(idle.SetReadDeadline(time.Time{}))
	need(idle.(*d2tp.Conn).Finish(time.Second))
	_, err = idle.Read(answer)
	var why *d2tp.Error
	if !errors.As(err, &why) {
		log.Fatal("no end: ", err)
	}
	fmt.Println("deadline ok:", why.Words)

	through := d2tp.Dialer{Proxy: proxy, Deadline: time.Minute}
	client := http.Client{Transport: &http.Transport{DialContext: through.DialContext}}
	page, err := client.Get(url)
	need(err)
	body, err := io.ReadAll(page.Body)
	need(err)
	fmt.Println("http ok:", string(body))

	_, err = through.Dial("tcp", "nobody.example:80")
	if !errors.Is(err, syscall.EHOSTUNREACH) {
		log.Fatal("not unreachable: ", err)
	}
	fmt.Println("refused:", err)
}
