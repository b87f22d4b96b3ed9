// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package livemap

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"
)

// Who is admitted and reads nothing is given up, whatever was asked for.
func TestWhoReadsNothingIsDropped(t *testing.T) {
	client, _ := reviewer()
	history := NewHistory(Limits{Age: time.Hour, Bytes: 1 << 30})
	long := strings.Repeat("x", 1<<20)
	values := map[Key]Value{}
	for i := range 40 { // more than the kernel keeps for a connection
		values[Key{Node, fmt.Sprint("node-", i)}] = Value{json.RawMessage(`"` + long + `"`)}
	}
	history.Commit(start, values)
	s := NewServer(Title{}, NewFeed(history), NewReview(client), func(context.Context, string, string) ([]Line, error) {
		return []Line{{Text: strings.Repeat(long, 40)}}, nil
	})
	s.stuck = 300 * time.Millisecond
	ended := make(chan string, 3)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.ServeHTTP(w, r)
		ended <- r.URL.Path
	}))
	t.Cleanup(server.Close)
	open := map[string]bool{}
	for _, path := range []string{"/api/stream", "/api/at?from=0&time=9999999999999", "/api/why?namespace=a&pod=b"} {
		connection, err := net.Dial("tcp", server.Listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { connection.Close() }) // before the server, which waits for its requests
		if _, err := fmt.Fprintf(connection, "GET %s HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer reader\r\n\r\n", path); err != nil {
			t.Fatal(err)
		}
		path, _, _ = strings.Cut(path, "?")
		open[path] = true
	}
	for late := time.After(2 * time.Minute); len(open) > 0; {
		select {
		case path := <-ended:
			delete(open, path)
		case <-late:
			t.Fatalf("%v are held", open)
		}
	}
}

// A user has a number of streams, and all have one; each that ends makes place.
func TestPlaces(t *testing.T) {
	p := &places{each: 2, all: 3}
	for i, tc := range []struct {
		user   string
		leaves bool
		want   int
	}{
		{user: "a"},
		{user: "a"},
		{user: "a", want: 429},
		{user: "b"},
		{user: "b", want: 503},
		{user: "a", leaves: true},
		{user: "b"},
		{user: "a", want: 503},
		{user: "b", leaves: true},
		{user: "b", leaves: true},
		{user: "a"},
		{user: "c"},
	} {
		if tc.leaves {
			p.leave(tc.user)
			continue
		}
		if refused := p.take(tc.user); (refused == nil) != (tc.want == 0) || refused != nil && refused.status != tc.want {
			t.Errorf("step %d: %+v, want %d", i, refused, tc.want)
		}
	}
	if len(p.taken) != 2 {
		t.Errorf("who is gone is kept: %v", p.taken)
	}
}

// A user's streams do not keep its own answers out, nor others' streams.
func TestStreamsOfAUser(t *testing.T) {
	client, _ := reviewer()
	s := NewServer(Title{}, NewFeed(NewHistory(Limits{})), NewReview(client), nil)
	server := httptest.NewServer(s)
	t.Cleanup(server.Close)
	ask := func(path, token string) *http.Response {
		return request(t, server.URL+path, func(r *http.Request) { r.Header.Set("Authorization", "Bearer "+token) })
	}
	var streams []*http.Response
	for range 20 {
		if streams = append(streams, ask("/api/stream", "reader")); streams[len(streams)-1].StatusCode != http.StatusOK {
			t.Fatalf("stream %d: %s", len(streams), streams[len(streams)-1].Status)
		}
	}
	response := ask("/api/stream", "reader")
	text, err := io.ReadAll(response.Body)
	if response.StatusCode != http.StatusTooManyRequests || !strings.Contains(string(text), "20 of these open") {
		t.Errorf("one more: %s, %v: %s", response.Status, err, text)
	}
	for _, tc := range []struct {
		path, token string
		want        int
	}{{"/api/stream", "other", 200}, {"/api/at", "reader", 400}} {
		if response := ask(tc.path, tc.token); response.StatusCode != tc.want {
			t.Errorf("%s of %s: %s", tc.path, tc.token, response.Status)
		}
	}
	streams[0].Body.Close()
	for deadline := time.Now().Add(10 * time.Second); ask("/api/stream", "reader").StatusCode != http.StatusOK; {
		if time.Now().After(deadline) {
			t.Fatal("a stream that is closed keeps its place")
		}
	}
}
