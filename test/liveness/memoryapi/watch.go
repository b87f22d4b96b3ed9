// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package memoryapi

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"strconv"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
)

// event is one change of an object, encoded as watches send it.
type event struct {
	version int64
	kind    watch.EventType
	object  runtime.Object
	line    []byte
}

// encodeEvent has the object's kind in it, which clients decode by.
func encodeEvent(kind watch.EventType, object runtime.Object) []byte {
	line, err := json.Marshal(struct {
		Type   watch.EventType `json:"type"`
		Object runtime.Object  `json:"object"`
	}{kind, object})
	if err != nil {
		panic(err) // API objects can be encoded
	}
	return append(line, '\n')
}

// watchObjects answers a watch with a stream. It begins with what there is, if the client asks for that, or after the version that
// the client knows.
func (s *Server) watchObjects(req *http.Request, r request) (*http.Response, error) {
	query := req.URL.Query()
	s.mutex.Lock()
	k := s.kind(r.resource)
	var first []byte
	next := 0
	if query.Get("sendInitialEvents") == "true" {
		version := s.version
		if k.held {
			version = k.shownVersion
		}
		for _, stored := range s.ordered(r, k.asShown()) {
			first = append(first, encodeEvent(watch.Added, stored)...)
		}
		first = append(first, encodeEvent(watch.Bookmark, initialEventsEnd(r, version))...)
		next = k.shown
	} else {
		since, _ := strconv.ParseInt(query.Get("resourceVersion"), 10, 64)
		if since > 0 && since < s.compacted {
			s.mutex.Unlock()
			return answer(req, nil, apierrors.NewResourceExpired("too old resource version"))
		}
		for next < len(k.log) && k.log[next].version <= since {
			next++
		}
	}
	generation := k.generation
	s.mutex.Unlock()

	ctx, cancel := context.WithCancel(req.Context())
	reader, writer := io.Pipe()
	wake := context.AfterFunc(ctx, func() {
		s.mutex.Lock()
		defer s.mutex.Unlock()
		s.changed.Broadcast()
	})
	go func() {
		defer wake()
		defer writer.Close()
		if _, err := writer.Write(first); err != nil {
			return
		}
		for {
			lines, ok := s.following(ctx, k, generation, &next)
			if !ok {
				return
			}
			if _, err := writer.Write(lines); err != nil {
				return
			}
		}
	}()
	return &http.Response{
		Status: "200 OK", StatusCode: http.StatusOK, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1, Request: req,
		Header: http.Header{"Content-Type": {"application/json"}}, Body: &stream{PipeReader: reader, cancel: cancel},
	}, nil
}

// following waits for events after those that a watch has had. It is false when the watch has ended.
func (s *Server) following(ctx context.Context, k *kind, generation int, next *int) ([]byte, bool) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	for ctx.Err() == nil && k.generation == generation && *next >= k.shown {
		s.changed.Wait()
	}
	if ctx.Err() != nil || k.generation != generation {
		return nil, false
	}
	var lines []byte
	for ; *next < k.shown; *next++ {
		lines = append(lines, k.log[*next].line...)
	}
	return lines, true
}

// initialEventsEnd tells a client that it has had everything there was at a version.
func initialEventsEnd(r request, version int64) runtime.Object {
	object := r.newObject()
	object.GetObjectKind().SetGroupVersionKind(r.kind)
	m := object.(metav1.Object)
	m.SetResourceVersion(strconv.FormatInt(version, 10))
	m.SetAnnotations(map[string]string{metav1.InitialEventsAnnotationKey: "true"})
	return object
}

// stream is the body of a watch's answer. Who closes it ends the watch.
type stream struct {
	*io.PipeReader
	cancel context.CancelFunc
}

func (s *stream) Close() error {
	s.cancel()
	return s.PipeReader.Close()
}
