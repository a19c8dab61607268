// A Go client as they are written: fetch URL.
package main

import (
	"fmt"
	"io"
	"net/http"
	"os"
)

func main() {
	// Not by the environment: the sockets are what is to be caught.
	client := http.Client{Transport: &http.Transport{Proxy: nil}}
	answer, err := client.Get(os.Args[1])
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(3)
	}
	if _, err := io.Copy(os.Stdout, answer.Body); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(4)
	}
}
