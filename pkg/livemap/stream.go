// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package livemap

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"
)

// pageValues is how many nodes and pods an event has at most: a browser draws the first of a large cluster before it has the last.
const pageValues = 200

// stream tells a browser everything, and then each change, as server-sent events
// (https://html.spec.whatwg.org/multipage/server-sent-events.html): "title", "status", and "change", whose ID is its version. After a
// pause the browser names the last one that it has, and goes on there. A browser that is slow gets several changes as one.
func (s *Server) stream(w http.ResponseWriter, r *http.Request) {
	var at Version
	if id := r.Header.Get("Last-Event-ID"); id != "" {
		n, err := strconv.ParseInt(id, 10, 64)
		if err != nil || n < 0 {
			http.Error(w, fmt.Sprintf("Last-Event-ID: Invalid value: %q: want a version", id), http.StatusBadRequest)
			return
		}
		at = Version(n)
	}
	w.Header().Set("Content-Type", "text/event-stream")
	out := s.events(w)
	title, err := json.Marshal(s.title)
	if err != nil {
		return
	}
	out.event("title", 0, title)
	beat := time.NewTicker(s.beat)
	defer beat.Stop()
	answered := time.Now()
	// goesOn asks whether the reader is still admitted.
	goesOn := func() bool {
		switch _, refused := s.admission.admit(r); {
		case refused == nil:
			answered = time.Now()
		case refused.status != http.StatusServiceUnavailable || time.Since(answered) >= s.patience:
			return false // the next request is told why
		}
		return true
	}
	for told := (*Status)(nil); out.err == nil; {
		status, statusChanged := s.feed.Status()
		changed := s.feed.history.Changed()
		if text, err := json.Marshal(status); err == nil && (told == nil || !status.equal(told)) {
			told = &status
			out.event("status", 0, text)
		}
		if last, ok := s.feed.history.Last(); ok && last.Version != at {
			diff, _ := s.feed.history.Diff(at, last.Version)
			for _, page := range diff.pages(pageValues) {
				var text bytes.Buffer
				page.write(&text, page.more)
				out.event("change", page.id(), text.Bytes())
				select {
				case <-beat.C: // who reads slowly takes many beats for all pages
					if !goesOn() {
						return
					}
				default:
				}
			}
			at = diff.Version
		}
		out.flush()
		select {
		case <-r.Context().Done():
			return
		case <-changed:
		case <-statusChanged:
		case <-beat.C:
			if !goesOn() {
				return
			}
			out.raw(": still here\n\n")
		}
	}
}

// events writes server-sent events, up to the first error.
type events struct {
	w       http.ResponseWriter
	control *http.ResponseController
	stuck   time.Duration
	err     error
}

func (s *Server) events(w http.ResponseWriter) *events {
	return &events{w: w, control: http.NewResponseController(w), stuck: s.stuck}
}

// event writes one. Its data is one line, and an ID of 0 is none.
func (e *events) event(name string, id Version, data []byte) {
	head := "event: " + name + "\n"
	if id != 0 {
		head += fmt.Sprintf("id: %d\n", id)
	}
	e.raw(head + "data: " + string(data) + "\n\n")
}

func (e *events) raw(text string) {
	if e.err == nil {
		_ = e.control.SetWriteDeadline(time.Now().Add(e.stuck)) // tests' writers have none
		_, e.err = e.w.Write([]byte(text))
	}
}

func (e *events) flush() {
	if e.err == nil {
		e.err = e.control.Flush()
	}
}

// page is a part of a diff.
type page struct {
	*Diff
	first, more bool
	keys        []Key
}

// pages divides a diff into parts of n values, by kind and name.
func (d *Diff) pages(n int) (pages []page) {
	keys := slices.SortedFunc(maps.Keys(d.Values), func(a, b Key) int {
		return cmp.Or(strings.Compare(string(a.Kind), string(b.Kind)), strings.Compare(a.Name, b.Name))
	})
	for first := true; first || len(keys) > 0; first = false {
		size := min(n, len(keys))
		pages = append(pages, page{Diff: d, first: first, more: size < len(keys), keys: keys[:size]})
		keys = keys[size:]
	}
	return pages
}

// id is the version, or 0 if more is to come: what is half told cannot be gone on from.
func (p *page) id() Version {
	if p.more {
		return 0
	}
	return p.Version
}

// write writes it as JSON. "full" tells that what the browser has is void.
func (p *page) write(out *bytes.Buffer, more bool) {
	fmt.Fprintf(out, `{"version":%d,"time":%d,"oldest":%d,"full":%t,"more":%t`, p.Version, p.Time.UnixMilli(), p.Oldest,
		p.Full && p.first, more)
	for _, kind := range []Kind{Node, Pod} {
		fmt.Fprintf(out, `,%q:{`, kind)
		separator := ""
		for _, key := range p.keys {
			if key.Kind != kind {
				continue
			}
			name, _ := json.Marshal(key.Name) // a string has JSON
			out.WriteString(separator)
			out.Write(name)
			out.WriteByte(':')
			p.Values[key].write(out)
			separator = ","
		}
		out.WriteByte('}')
	}
	if !p.more && len(p.Moments) > 0 { // with the last page: one that does not get as far is told them again, with all pages
		out.WriteString(`,"moments":[`)
		for i, m := range p.Moments {
			if i > 0 {
				out.WriteByte(',')
			}
			fmt.Fprintf(out, "[%d,%d,%d]", m.Version, m.Time.UnixMilli(), m.Changes)
		}
		out.WriteByte(']')
	}
	out.WriteByte('}')
}

// write writes a list of its parts, or null if it is not there (any more).
func (v Value) write(out *bytes.Buffer) {
	if len(v) == 0 {
		out.WriteString("null")
		return
	}
	for i, part := range v {
		out.WriteByte("[,"[min(i, 1)])
		out.Write(part)
	}
	out.WriteByte(']')
}
