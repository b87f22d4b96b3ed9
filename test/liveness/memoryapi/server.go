// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package memoryapi

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

// Server has all objects of a cluster.
type Server struct {
	// OnDelete is told of each object that is gone, while nothing else happens: a garbage collector's ear.
	OnDelete func(runtime.Object)
	// FirstNode is the place of the node with which lists of nodes begin; those before it come last. No API server promises an order.
	FirstNode atomic.Int64

	mutex   sync.Mutex
	changed *sync.Cond // watches may have something to send
	version int64
	objects int // ever created
	// compacted is the version before which no watch can begin any more.
	compacted int64
	kinds     map[schema.GroupVersionResource]*kind
	fault     FaultFunc
	accepted  func(Write)
	problems  []error
}

// kind is all objects of a kind.
type kind struct {
	objects map[types.NamespacedName]runtime.Object
	log     []event
	// shown are how many of the events watches may send, and shownVersion is how far the server was when it held the others back.
	shown        int
	shownVersion int64
	held         bool
	generation   int // of watches: those of an older one have ended
}

// Write is an accepted write.
type Write struct {
	Client  string // who wrote
	Verb    string // create, update, patch, delete
	What    string // resource or resource/subresource
	Version int64
	Before  runtime.Object // as it was, nil if there was none; read only
	Object  runtime.Object // as it is now; read only
	Deleted bool           // and it is gone
}

// New returns a server without objects.
func New() *Server {
	s := &Server{version: 1, kinds: map[schema.GroupVersionResource]*kind{}}
	s.changed = sync.NewCond(&s.mutex)
	return s
}

// Clone returns another server with the same objects. Nobody has heard anything of it yet, and nothing goes wrong with it.
func (s *Server) Clone() *Server {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	clone := New()
	clone.version, clone.objects, clone.compacted = s.version, s.objects, s.version
	for resource, k := range s.kinds {
		clone.kinds[resource] = &kind{objects: maps.Clone(k.objects), log: slices.Clip(k.log), shown: len(k.log)}
	}
	return clone
}

// Client returns a client by the given name.
func (s *Server) Client(name string) kubernetes.Interface {
	return kubernetes.NewForConfigOrDie(s.Config(name))
}

// Config connects to the server.
func (s *Server) Config(name string) *rest.Config {
	return &rest.Config{
		Host: "http://memory", QPS: -1, UserAgent: name,
		ContentConfig: rest.ContentConfig{ContentType: runtime.ContentTypeJSON, AcceptContentTypes: runtime.ContentTypeJSON},
		Transport:     roundTripper(func(req *http.Request) (*http.Response, error) { return s.serve(name, req) }),
	}
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(req *http.Request) (*http.Response, error) { return f(req) }

// OnWrite has fn called with each accepted write, while nothing else happens.
func (s *Server) OnWrite(fn func(Write)) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	s.accepted = fn
}

// Problems are requests that a real API server knows and this one does not.
func (s *Server) Problems() error {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	return errors.Join(s.problems...)
}

// Hold keeps the watches of a resource from sending anything, until Release.
func (s *Server) Hold(resource schema.GroupVersionResource) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	k := s.kind(resource)
	if !k.held {
		k.held, k.shownVersion = true, s.version
	}
}

// Release lets the watches of a resource send what was held back.
func (s *Server) Release(resource schema.GroupVersionResource) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	k := s.kind(resource)
	k.held = false
	s.show(k)
}

// EndWatches ends all watches, as a restarting API server does. New ones begin where they ask to.
func (s *Server) EndWatches() {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	for _, k := range s.kinds {
		k.generation++
	}
	s.changed.Broadcast()
}

// Compact forgets what has happened until now: a watch that wants to begin before gets 410 Gone.
func (s *Server) Compact() {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	s.compacted = s.version
}

func (s *Server) kind(resource schema.GroupVersionResource) *kind {
	k := s.kinds[resource]
	if k == nil {
		k = &kind{objects: map[types.NamespacedName]runtime.Object{}}
		s.kinds[resource] = k
	}
	return k
}

func (s *Server) show(k *kind) {
	if k.held {
		return
	}
	k.shown = len(k.log)
	s.changed.Broadcast()
}

// asShown returns the objects of which watches have told.
func (k *kind) asShown() map[types.NamespacedName]runtime.Object {
	objects := map[types.NamespacedName]runtime.Object{}
	for _, e := range k.log[:k.shown] {
		if e.kind == watch.Deleted {
			delete(objects, nameOf(e.object))
		} else {
			objects[nameOf(e.object)] = e.object
		}
	}
	return objects
}

// ordered returns objects in the order of a list.
func (s *Server) ordered(r request, objects map[types.NamespacedName]runtime.Object) []runtime.Object {
	var names []types.NamespacedName
	for name := range objects {
		names = append(names, name)
	}
	slices.SortFunc(names, func(a, b types.NamespacedName) int { return strings.Compare(a.String(), b.String()) })
	var all []runtime.Object
	for _, name := range names {
		all = append(all, objects[name])
	}
	if first := int(s.FirstNode.Load()); r.resource.Resource == "nodes" && first < len(all) {
		all = slices.Concat(all[first:], all[:first])
	}
	return all
}

func nameOf(object runtime.Object) types.NamespacedName {
	m := object.(metav1.Object)
	return types.NamespacedName{Namespace: m.GetNamespace(), Name: m.GetName()}
}

// serve answers one request.
func (s *Server) serve(client string, req *http.Request) (*http.Response, error) {
	r, known := parsePath(req.URL.Path)
	if !known {
		return answer(req, nil, s.unknown(client, req))
	}
	if err := req.Context().Err(); err != nil {
		return nil, err
	}
	if req.Method == http.MethodGet {
		if req.URL.Query().Get("watch") != "" {
			return s.watchObjects(req, r)
		}
		if fault := s.faultFor(client, "get", r); fault != None {
			return fault.withoutEffect(req, r)
		}
		return s.read(req, r)
	}
	var body []byte
	if req.Body != nil {
		var err error
		if body, err = io.ReadAll(req.Body); err != nil {
			return nil, err
		}
	}
	w := &write{
		request: r, server: s, client: client, body: body, manager: req.URL.Query().Get("fieldManager"),
		contentType: req.Header.Get("Content-Type"),
	}
	if w.manager == "" {
		w.manager, _, _ = strings.Cut(client, "/")
	}
	w.verb = map[string]string{
		http.MethodPost: "create", http.MethodPut: "update", http.MethodPatch: "patch",
		http.MethodDelete: "delete",
	}[req.Method]
	fault := s.faultFor(client, w.verb, r)
	if !fault.takesEffect() {
		if fault == Late {
			s.later(w)
		}
		return fault.withoutEffect(req, r)
	}
	object, err := w.carryOut()
	switch {
	case fault == NoAnswer && err == nil:
		return nil, errNoAnswer
	case fault == Slow:
		select {
		case <-time.After(lateBy):
		case <-req.Context().Done():
			return nil, req.Context().Err()
		}
	}
	return answer(req, object, err)
}

func (s *Server) unknown(client string, req *http.Request) error {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	s.problems = append(s.problems, fmt.Errorf("the API in memory does not know %s %s, which %s asked for", req.Method, req.URL.Path, client))
	return apierrors.NewNotFound(schema.GroupResource{}, req.URL.Path)
}

func (s *Server) read(req *http.Request, r request) (*http.Response, error) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	k := s.kind(r.resource)
	if r.name != "" {
		object := k.objects[types.NamespacedName{Namespace: r.namespace, Name: r.name}]
		if object == nil {
			return answer(req, nil, apierrors.NewNotFound(r.groupResource(), r.name))
		}
		return answer(req, object, nil)
	}
	list := struct {
		metav1.TypeMeta `json:",inline"`
		metav1.ListMeta `json:"metadata"`
		Items           []runtime.Object `json:"items"`
	}{TypeMeta: metav1.TypeMeta{Kind: r.kind.Kind + "List", APIVersion: r.kind.GroupVersion().String()}, Items: []runtime.Object{}}
	list.ResourceVersion = strconv.FormatInt(s.version, 10)
	for _, object := range s.ordered(r, k.objects) {
		if r.namespace == "" || object.(metav1.Object).GetNamespace() == r.namespace {
			list.Items = append(list.Items, object)
		}
	}
	return encode(req, http.StatusOK, list)
}

// answer encodes an object or an error.
func answer(req *http.Request, object runtime.Object, err error) (*http.Response, error) {
	if err == nil {
		return encode(req, http.StatusOK, object)
	}
	status, ok := err.(apierrors.APIStatus)
	if !ok {
		status = apierrors.NewInternalError(err)
	}
	full := status.Status()
	full.TypeMeta = metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}
	return encode(req, int(full.Code), &full)
}

func encode(req *http.Request, code int, value any) (*http.Response, error) {
	body, err := json.Marshal(value)
	if err != nil {
		return nil, fmt.Errorf("encode the answer to %s: %w", req.URL.Path, err)
	}
	return &http.Response{
		Status: http.StatusText(code), StatusCode: code, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1, Request: req,
		Header: http.Header{"Content-Type": {"application/json"}}, Body: io.NopCloser(bytes.NewReader(body)), ContentLength: int64(len(body)),
	}, nil
}
