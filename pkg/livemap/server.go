// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package livemap

import (
	"bytes"
	"context"
	"embed"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"strconv"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

//go:embed all:web/dist
var dist embed.FS

// Title says what the map shows.
type Title struct {
	// Cluster is the context of the kubeconfig, or the file.
	Cluster string `json:"cluster"`
	// File: it is a snapshot file, and does not change.
	File bool `json:"file,omitempty"`
	// Taken is when the file was taken.
	Taken *metav1.Time `json:"taken,omitempty"`
	// Version is the server's.
	Version string `json:"version"`
}

// Line is a line of an answer.
type Line struct {
	// Indent is how deep it is: 0, 1.
	Indent int    `json:"indent"`
	Text   string `json:"text"`
}

// Server hands the page and what it shows to browsers that are admitted. It is an [http.Handler].
type Server struct {
	title     Title
	feed      *Feed
	admission Admission
	why       func(ctx context.Context, namespace, pod string) ([]Line, error)
	asking    chan struct{}
	handler   http.Handler
	beat      time.Duration
	// patience is how long a stream goes on without an answer about its token.
	patience time.Duration
	// answering is how long an answer to why may take: a tenant may write a pod that takes hours, and others wait for theirs.
	answering time.Duration
	// stuck is how long a browser may take to read what is written at once.
	stuck time.Duration
}

// NewServer returns one for what a feed tells. The function why answers why a pod waits; it is called for one pod at a time.
func NewServer(title Title, feed *Feed, admission Admission, why func(ctx context.Context, namespace, pod string) ([]Line, error)) *Server {
	s := &Server{
		title: title, feed: feed, admission: admission, why: why, asking: make(chan struct{}, 1), beat: 15 * time.Second,
		patience: time.Minute, answering: time.Minute, stuck: 30 * time.Second,
	}
	page, err := fs.Sub(dist, "web/dist")
	if err != nil {
		panic(err) // its name is fixed
	}
	mux := http.NewServeMux()
	mux.Handle("GET /", http.FileServerFS(page))
	if access, ok := admission.(*Access); ok {
		mux.HandleFunc("POST /api/session", access.session)
	}
	streams, answers := &places{each: 20, all: 200}, &places{each: 8, all: 40}
	for path, api := range map[string]struct {
		handle http.HandlerFunc
		places *places
	}{"stream": {s.stream, streams}, "at": {s.at, answers}, "why": {s.answer, answers}} {
		mux.HandleFunc("GET /api/"+path, func(w http.ResponseWriter, r *http.Request) {
			user, refused := admission.admit(r)
			if refused == nil {
				if refused = api.places.take(user); refused == nil {
					defer api.places.leave(user)
				}
			}
			if refused != nil {
				if refused.status == http.StatusUnauthorized {
					w.Header().Set("WWW-Authenticate", "Bearer")
				}
				http.Error(w, refused.text, refused.status)
				return
			}
			control := http.NewResponseController(w) // who is admitted may take longer than limits of the HTTP server let others
			_, _ = control.SetReadDeadline(time.Time{}), control.SetWriteDeadline(time.Now().Add(s.stuck))
			api.handle(w, r)
		})
	}
	s.handler = guard(admission.foreign, mux)
	return s
}

// HTTP is the server for a listener. Who is not admitted holds no connection for longer than the limit. Others can connect.
func (s *Server) HTTP(limit time.Duration) *http.Server {
	return &http.Server{Handler: s, ReadTimeout: limit, WriteTimeout: limit, IdleTimeout: limit, MaxHeaderBytes: 16 << 10}
}

func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) { s.handler.ServeHTTP(w, r) }

// at leads from the version "from" to what was at "time", in milliseconds since 1970.
func (s *Server) at(w http.ResponseWriter, r *http.Request) {
	from, err := number(r, "from")
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	when, err := number(r, "time")
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	to, ok := s.feed.history.At(time.UnixMilli(when))
	if !ok {
		http.Error(w, "nothing is read from the cluster yet", http.StatusServiceUnavailable)
		return
	}
	diff, _ := s.feed.history.Diff(Version(from), to.Version)
	diff.Moments = nil
	w.Header().Set("Content-Type", "application/json")
	var out bytes.Buffer
	for _, page := range diff.pages(len(diff.Values)) {
		page.write(&out, false)
	}
	for part := s.events(w); out.Len() > 0 && part.err == nil; {
		part.raw(string(out.Next(1 << 20)))
	}
}

// answer says why a pod waits.
func (s *Server) answer(w http.ResponseWriter, r *http.Request) {
	namespace, pod := r.FormValue("namespace"), r.FormValue("pod")
	if namespace == "" || pod == "" {
		http.Error(w, "namespace and pod: Required value", http.StatusBadRequest)
		return
	}
	select {
	case s.asking <- struct{}{}:
		defer func() { <-s.asking }()
	case <-r.Context().Done():
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), s.answering)
	defer cancel()
	lines, err := s.why(ctx, namespace, pod)
	if err != nil && errors.Is(ctx.Err(), context.DeadlineExceeded) {
		err = fmt.Errorf("no answer within %v, as for a pod whose CEL expressions take long: ask 'kubectl stowage why %s -n %s'",
			s.answering, pod, namespace)
	}
	_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(s.stuck)) // it may have taken long
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadGateway)
		return
	}
	writeJSON(w, map[string][]Line{"lines": lines})
}

func number(r *http.Request, name string) (int64, error) {
	text := r.FormValue(name)
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		return 0, fmt.Errorf("%s: Invalid value: %q: want a whole number", name, text)
	}
	return n, nil
}

func writeJSON(w http.ResponseWriter, object any) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(object) // a browser that is gone
}
