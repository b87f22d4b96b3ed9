package main

import (
	"crypto/tls"
	"encoding/json"
	"errors"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"sync/atomic"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

// The API server says who a caller is and what it may read. Where it cannot be asked nothing is read.
func TestTheAPIServerSaysWhoReads(t *testing.T) {
	var asked atomic.Int32
	mux := http.NewServeMux()
	mux.HandleFunc("POST /apis/authentication.k8s.io/v1/tokenreviews", func(w http.ResponseWriter, r *http.Request) {
		asked.Add(1)
		review := read[authenticationv1.TokenReview](t, r)
		if name := review.Spec.Token; name != "nobody" {
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
		review.Status.Allowed = review.Spec.User == "prometheus" && of == authorizationv1.NonResourceAttributes{Path: "/metrics", Verb: "get"}
		write(t, w, review)
	})
	api := httptest.NewServer(mux)
	defer api.Close()
	client, err := kubernetes.NewForConfig(&rest.Config{Host: api.URL})
	if err != nil {
		t.Fatal(err)
	}
	readers, err := newReaders(t.Context(), client, "")
	if err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct {
		token, path string
		want        int
		asked       int32
	}{
		"no token":         {path: "/metrics", want: http.StatusUnauthorized},
		"a false token":    {token: "nobody", path: "/metrics", want: http.StatusUnauthorized, asked: 1},
		"who may not":      {token: "tenant", path: "/metrics", want: http.StatusForbidden, asked: 1},
		"who may":          {token: "prometheus", path: "/metrics", want: http.StatusOK, asked: 1},
		"another path":     {token: "guest", path: "/readyz", want: http.StatusForbidden, asked: 1},
		"no answer":        {token: "unlucky", path: "/metrics", want: http.StatusInternalServerError, asked: 1},
		"an administrator": {token: "root", path: "/readyz", want: http.StatusOK, asked: 1},
	} {
		t.Run(name, func(t *testing.T) {
			asked.Store(0)
			for range 3 { // the answer is kept
				request := httptest.NewRequest(http.MethodGet, tc.path, nil)
				if tc.token != "" {
					request.Header.Set("Authorization", "Bearer "+tc.token)
				}
				if got := readers.check(request); got != tc.want {
					t.Errorf("%d, want %d", got, tc.want)
				}
			}
			if got := asked.Load(); got != tc.asked {
				t.Errorf("the API server is asked %d times who that is, want %d", got, tc.asked)
			}
		})
	}
}

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
			_, err = conn.Read(make([]byte, 12))
		}
		return err
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
}
