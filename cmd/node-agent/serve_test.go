// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

// The API server says who a caller is and what it may read. Where it cannot be asked nothing is read.
func TestTheAPIServerSaysWhoReads(t *testing.T) {
	var asked atomic.Int32
	api := httptest.NewServer(reviewer(t, &asked))
	defer api.Close()
	client, err := kubernetes.NewForConfig(&rest.Config{Host: api.URL, ContentConfig: asJSON})
	if err != nil {
		t.Fatal(err)
	}
	readers, err := newReaders(t.Context(), client, "")
	if err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct {
		token, path, method string
		want                int
		asked               int32
	}{
		"no token":         {path: "/metrics", want: http.StatusUnauthorized},
		"a false token":    {token: "nobody", path: "/metrics", want: http.StatusUnauthorized, asked: 1},
		"who may not":      {token: "tenant", path: "/metrics", want: http.StatusForbidden, asked: 1},
		"who may":          {token: "prometheus", path: "/metrics", want: http.StatusOK, asked: 1},
		"another path":     {token: "guest", path: "/readyz", want: http.StatusForbidden, asked: 1},
		"another method":   {token: "poet", path: "/metrics", method: "SING", want: http.StatusMethodNotAllowed},
		"no answer":        {token: "unlucky", path: "/metrics", want: http.StatusInternalServerError, asked: 1},
		"no review":        {token: "unreviewed", path: "/metrics", want: http.StatusServiceUnavailable, asked: 3}, // an error is not kept
		"an administrator": {token: "root", path: "/readyz", want: http.StatusOK, asked: 1},
	} {
		t.Run(name, func(t *testing.T) {
			asked.Store(0)
			for range 3 { // the answer is kept
				if got := readers.check(reading(name, tc.method, tc.path, tc.token)); got != tc.want {
					t.Errorf("%d, want %d", got, tc.want)
				}
			}
			if got := asked.Load(); got != tc.asked {
				t.Errorf("the API server is asked %d times who that is, want %d", got, tc.asked)
			}
		})
	}
}

// reading is a request from that address.
func reading(from, method, path, token string) *http.Request {
	request := httptest.NewRequest(cmp.Or(method, http.MethodGet), path, nil)
	request.RemoteAddr = net.JoinHostPort(from, "1234")
	if token != "" {
		request.Header.Set("Authorization", "Bearer "+token)
	}
	return request
}

// reviewer is an API server to which tokens are names. Those that begin with an x are nobody's.
func reviewer(t *testing.T, asked *atomic.Int32) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /apis/authentication.k8s.io/v1/tokenreviews", func(w http.ResponseWriter, r *http.Request) {
		asked.Add(1)
		review := read[authenticationv1.TokenReview](t, r)
		switch name := review.Spec.Token; {
		case name == "unreviewed":
			http.Error(w, "no", http.StatusForbidden)
			return
		case name == "nobody", name[0] == 'x':
			review.Status.Error = "[invalid bearer token, token lookup failed]" // as a real one says
		default:
			review.Status = authenticationv1.TokenReviewStatus{Authenticated: true, User: authenticationv1.UserInfo{Username: name}}
			if name == "root" {
				review.Status.User.Groups = []string{"system:masters"}
			}
		}
		write(t, w, review)
	})
	mux.HandleFunc("POST /apis/authorization.k8s.io/v1/subjectaccessreviews", func(w http.ResponseWriter, r *http.Request) {
		review := read[authorizationv1.SubjectAccessReview](t, r)
		if review.Spec.User == "unlucky" {
			http.Error(w, "no", http.StatusBadRequest)
			return
		}
		of := *review.Spec.NonResourceAttributes
		review.Status.Allowed = strings.HasPrefix(review.Spec.User, "prometheus") && of.Verb == "get" && (of.Path == "/metrics" || of.Path == gpuMetricsPath && review.Spec.User != "prometheus-2")
		write(t, w, review)
	})
	return mux
}

// Whoever sends tokens that nobody knows, however many, keeps neither those out who read before nor, from one address, those who never did.
func TestFalseTokensDoNotKeepReadersOut(t *testing.T) {
	for name, tc := range map[string]struct {
		addresses int
		asked     int32 // of 1000 false tokens
		stranger  int   // what one gets who reads for the first time
	}{
		"one address":    {addresses: 1, asked: turnsAtOnceOfOne, stranger: http.StatusOK},
		"many addresses": {addresses: 50, asked: turnsAtOnce - 1, stranger: http.StatusServiceUnavailable},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var asked atomic.Int32
				api := reviewer(t, &asked)
				away := false
				client, err := kubernetes.NewForConfig(&rest.Config{Host: "http://api", ContentConfig: asJSON, QPS: 1000, Burst: 1000, Transport: roundTrip(func(r *http.Request) (*http.Response, error) {
					if away {
						return nil, errors.New("no route to host")
					}
					answer := httptest.NewRecorder()
					api.ServeHTTP(answer, r)
					return answer.Result(), nil
				})})
				if err != nil {
					t.Fatal(err)
				}
				readers, err := newReaders(t.Context(), client, "")
				if err != nil {
					t.Fatal(err)
				}
				expect := func(when string, want int, request *http.Request) {
					t.Helper()
					if got := readers.check(request); got != want {
						t.Errorf("%s: %d, want %d", when, got, want)
					}
				}
				flood := func(seconds int) map[int]int {
					answers := map[int]int{}
					for i := range 1000 {
						answers[readers.check(reading(fmt.Sprint("10.0.0.", i%tc.addresses), "", "/metrics", fmt.Sprint("x", seconds, "-", i)))]++
					}
					return answers
				}
				expect("before", http.StatusOK, reading("10.0.1.1", "", "/metrics", "prometheus"))
				asked.Store(0)
				answers := flood(0)
				if got := int(asked.Load()); got != int(tc.asked) || answers[http.StatusUnauthorized] != got || answers[http.StatusServiceUnavailable] != 1000-got {
					t.Errorf("asked %d times, want %d, answers %v", got, tc.asked, answers)
				}
				expect("a stranger", tc.stranger, reading("10.0.1.2", "", "/metrics", "prometheus-2"))
				for i := range 10 {
					time.Sleep(2 * answerTTL)
					flood(i + 1)
					expect("one that has read before, in a flood", http.StatusOK, reading("10.0.1.1", "", "/metrics", "prometheus"))
				}
				time.Sleep(2 * answerTTL)
				away = true
				expect("while the API server is away", http.StatusServiceUnavailable, reading("10.0.1.1", "", "/metrics", "prometheus"))
			})
		})
	}
}

type roundTrip func(*http.Request) (*http.Response, error)

func (f roundTrip) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// asJSON is how read and write encode.
var asJSON = rest.ContentConfig{ContentType: "application/json"}

func read[T any](t *testing.T, r *http.Request) *T {
	review := new(T)
	if err := json.NewDecoder(r.Body).Decode(review); err != nil {
		t.Error(err)
	}
	return review
}

func write(t *testing.T, w http.ResponseWriter, review any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusCreated)
	if err := json.NewEncoder(w).Encode(review); err != nil {
		t.Error(err)
	}
}

// Whoever opens connections and asks nothing does not keep others out: the oldest are closed.
func TestIdleConnectionsDoNotKeepOthersOut(t *testing.T) {
	const most, many = 4, 40
	open := &connections{most: most}
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	server.Config.ConnState, server.Config.ErrorLog = open.changed, log.New(io.Discard, "", 0)
	server.StartTLS()
	defer server.Close()
	ask := func(conn net.Conn) error {
		_, err := io.WriteString(conn, "GET / HTTP/1.1\r\nHost: agent\r\n\r\n")
		if err == nil {
			_, err = conn.Read(make([]byte, 1024))
		}
		return err
	}
	// The kubelet keeps a connection, from the node's address. What others do from theirs is not its matter.
	node := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 2)}}
	kubelet, err := tls.DialWithDialer(&node, "tcp", server.Listener.Addr().String(), &tls.Config{InsecureSkipVerify: true})
	if err != nil {
		t.Fatal(err)
	}
	defer kubelet.Close()
	if err := ask(kubelet); err != nil {
		t.Fatal(err)
	}
	var conns []net.Conn
	for i := range many {
		var conn net.Conn
		conn, err := net.Dial("tcp", server.Listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		if i%2 == 1 { // half of them ask once, and stay
			conn = tls.Client(conn, &tls.Config{InsecureSkipVerify: true})
			if err := ask(conn); err != nil {
				t.Fatal("connection ", i, ": ", err)
			}
		}
		conns = append(conns, conn)
	}
	client := server.Client()
	if response, err := client.Get(server.URL); err != nil {
		t.Errorf("one that asks beside %d others: %v", many, err)
	} else {
		response.Body.Close()
	}
	for i, conn := range conns[:many-most] {
		_ = conn.SetReadDeadline(time.Now().Add(time.Minute))
		if _, err := io.Copy(io.Discard, conn); errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatalf("connection %d is open", i)
		}
	}
	if err := ask(kubelet); err != nil {
		t.Errorf("the kubelet's connection: %v", err)
	}
}

// Which connection makes room for another one.
func TestTheAddressWithTheMostConnectionsLosesOne(t *testing.T) {
	for name, tc := range map[string]struct {
		from string // the addresses of connections, the oldest first; the last is one too many
		cut  int
	}{
		"one address":                      {from: "a a a a a", cut: 0},
		"a flood after the kubelet":        {from: "k a a a a", cut: 1},
		"the kubelet after a flood":        {from: "a a a a k", cut: 0},
		"a flood around the kubelet":       {from: "a k a a k", cut: 0},
		"the larger of two floods":         {from: "b b a a a", cut: 2},
		"two that are alike":               {from: "k b a a b", cut: 1},
		"as many addresses as connections": {from: "k a b c d", cut: 0},
	} {
		t.Run(name, func(t *testing.T) {
			var conns []*connFrom
			var want []net.Conn
			open := &connections{most: 4}
			for i, address := range strings.Fields(tc.from) {
				conn := &connFrom{address: address, port: strconv.Itoa(i)}
				open.changed(conn, http.StateNew)
				if conns = append(conns, conn); i != tc.cut {
					want = append(want, conn)
				}
			}
			for i, conn := range conns {
				if conn.closed != (i == tc.cut) {
					t.Errorf("%s: connection %d is closed: %t", tc.from, i, conn.closed)
				}
			}
			if !slices.Equal(open.open, want) {
				t.Errorf("%s: %d are left, want all but %d in their order", tc.from, len(open.open), tc.cut)
			}
		})
	}
}

type connFrom struct {
	net.Conn
	address, port string
	closed        bool
}

func (c *connFrom) RemoteAddr() net.Addr { return c }
func (c *connFrom) Network() string      { return "tcp" }
func (c *connFrom) String() string       { return net.JoinHostPort(c.address, c.port) }
func (c *connFrom) Close() error         { c.closed = true; return nil }

// A connection of HTTP/2 would count as one, with hundreds of requests at once.
func TestTheServerSpeaksNoHTTP2(t *testing.T) {
	certificate, err := newCertificate(t.Context(), &options{nodeName: "node-1"})
	if err != nil {
		t.Fatal(err)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := newServer(http.NotFoundHandler(), certificate)
	server.ErrorLog = log.New(io.Discard, "", 0)
	done := make(chan error, 1)
	go func() { done <- server.ServeTLS(listener, "", "") }()
	defer func() {
		_ = server.Close()
		if err := <-done; !errors.Is(err, http.ErrServerClosed) {
			t.Error(err)
		}
	}()
	for name, tc := range map[string]struct {
		offered []string
		want    string
		refused bool
	}{
		"a caller that knows HTTP/2 alone": {offered: []string{"h2"}, refused: true},
		"one that knows both":              {offered: []string{"h2", "http/1.1"}, want: "http/1.1"},
		"one that does not say":            {},
	} {
		conn, err := tls.Dial("tcp", listener.Addr().String(), &tls.Config{InsecureSkipVerify: true, NextProtos: tc.offered})
		if (err != nil) != tc.refused {
			t.Errorf("%s: error %v, want one: %v", name, err, tc.refused)
		}
		if err != nil {
			continue
		}
		if got := conn.ConnectionState().NegotiatedProtocol; got != tc.want {
			t.Errorf("%s: %q is spoken, want %q", name, got, tc.want)
		}
		conn.Close()
	}
}

// Who does not read what it is sent holds up nobody when its connection is closed for another one.
func TestOneThatDoesNotReadIsCutOff(t *testing.T) {
	certificate, err := newCertificate(t.Context(), &options{nodeName: "node-1"})
	if err != nil {
		t.Fatal(err)
	}
	synctest.Test(t, func(t *testing.T) {
		const most, many = 2, 6
		open := &connections{most: most}
		start := time.Now()
		for i := range many {
			here, there := net.Pipe() // takes nothing that is not read
			defer here.Close()
			server := tls.Server(here, &tls.Config{GetCertificate: certificate, SessionTicketsDisabled: true})
			shaken := make(chan error, 1)
			go func() { shaken <- server.Handshake() }()
			if err := errors.Join(tls.Client(there, &tls.Config{InsecureSkipVerify: true}).Handshake(), <-shaken); err != nil {
				t.Fatal("connection ", i, ": ", err)
			}
			defer there.Close()
			open.changed(server, http.StateIdle)
			if took := time.Since(start); took > 0 {
				t.Fatalf("connection %d waits %s for another one to be closed", i, took)
			}
			if want := min(i+1, most); len(open.open) != want {
				t.Errorf("%d connections are open, want %d", len(open.open), want)
			}
		}
	})
}
