// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package livemap

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	osruntime "runtime"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"stowage.dev/stowage/pkg/snapshot"
	"stowage.dev/stowage/pkg/snapshot/snapshottest"
)

// serve serves what a feed tells. The answer to why is the pod's name, after as many as may be sent to go.
func serve(t *testing.T, feed *Feed, limits ...func(*Server)) (*httptest.Server, *Access) {
	t.Helper()
	access := NewAccess()
	s := NewServer(Title{Cluster: "test", Version: "v0"}, feed, access, func(_ context.Context, namespace, pod string) ([]Line, error) {
		if pod == "nobody" {
			return nil, errors.New("pod a/nobody: there is none")
		}
		return []Line{{Text: namespace + "/" + pod + " waits."}, {Indent: 1, Text: "<b>"}}, nil
	})
	for _, limit := range limits {
		limit(s)
	}
	server := httptest.NewServer(s)
	t.Cleanup(server.Close)
	return server, access
}

func request(t *testing.T, url string, change func(*http.Request)) *http.Response {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	if change != nil {
		change(r)
	}
	response, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { response.Body.Close() })
	return response
}

// Only the server's own page, with its token, is told anything of the cluster.
func TestAccess(t *testing.T) {
	server, access := serve(t, NewFeed(NewHistory(Limits{})))
	token := "Bearer " + access.Token
	for name, tc := range map[string]struct {
		path, host, origin, site, token string
		want                            int
	}{
		"page":                            {path: "/", want: 200},
		"script":                          {path: "/map.js", want: 200},
		"no such file":                    {path: "/../server.go", want: 404},
		"with the token":                  {path: "/api/why?namespace=a&pod=b", token: token, want: 200},
		"a forwarded port":                {path: "/api/why?namespace=a&pod=b", token: token, host: "localhost:9999", origin: "http://localhost:9999", want: 200},
		"IPv6":                            {path: "/api/why?namespace=a&pod=b", token: token, host: "[::1]:80", want: 200},
		"own page":                        {path: "/api/why?namespace=a&pod=b", token: token, site: "same-origin", want: 200},
		"without token":                   {path: "/api/why?namespace=a&pod=b", want: 401},
		"stream without token":            {path: "/api/stream", want: 401},
		"history without token":           {path: "/api/at?from=0&time=0", want: 401},
		"wrong token":                     {path: "/api/stream", token: token + "x", want: 401},
		"token without a scheme":          {path: "/api/stream", token: access.Token, want: 401},
		"empty token":                     {path: "/api/stream", token: "Bearer ", want: 401},
		"code for token":                  {path: "/api/stream", token: "Bearer " + access.Code(), want: 401},
		"a name that leads here":          {path: "/api/why?namespace=a&pod=b", token: token, host: "evil.example", want: 403},
		"page under such a name":          {path: "/", host: "evil.example:80", want: 403},
		"a name like ours":                {path: "/", host: "localhost.evil.example", want: 403},
		"another address":                 {path: "/", host: "10.0.0.1", want: 403},
		"another origin":                  {path: "/api/why?namespace=a&pod=b", token: token, origin: "http://evil.example", want: 403},
		"another port":                    {path: "/api/why?namespace=a&pod=b", token: token, origin: "http://127.0.0.1:1", want: 403},
		"an origin that is none":          {path: "/api/why?namespace=a&pod=b", token: token, origin: "null", want: 403},
		"script for another site":         {path: "/map.js", site: "cross-site", want: 403},
		"script for a neighbouring port":  {path: "/map.js", site: "same-site", want: 403},
		"a missing name":                  {path: "/api/why?namespace=a", token: token, want: 400},
		"a pod that is not there":         {path: "/api/why?namespace=a&pod=nobody", token: token, want: 502},
		"no time":                         {path: "/api/at?from=0", token: token, want: 400},
		"a version that is none":          {path: "/api/at?from=x&time=0", token: token, want: 400},
		"history before anything is read": {path: "/api/at?from=0&time=0", token: token, want: 503},
	} {
		t.Run(name, func(t *testing.T) {
			response := request(t, server.URL+tc.path, func(r *http.Request) {
				if tc.host != "" {
					r.Host = tc.host
				}
				for header, value := range map[string]string{"Authorization": tc.token, "Origin": tc.origin, "Sec-Fetch-Site": tc.site} {
					if value != "" {
						r.Header.Set(header, value)
					}
				}
			})
			body, err := io.ReadAll(response.Body)
			if err != nil || response.StatusCode != tc.want {
				t.Errorf("%v: %s %s", err, response.Status, body)
			}
			if tc.want >= 400 && strings.Contains(string(body), access.Token) {
				t.Errorf("the answer has the token: %s", body)
			}
			if got := response.Header.Get("Content-Security-Policy"); !strings.HasPrefix(got, "default-src 'none'; script-src 'self';") ||
				response.Header.Get("Access-Control-Allow-Origin") != "" || response.Header.Get("X-Content-Type-Options") != "nosniff" {
				t.Errorf("headers %v", response.Header)
			}
		})
	}
}

// The code on the browser's command line is good once.
func TestTheCodeIsGoodOnce(t *testing.T) {
	server, access := serve(t, NewFeed(NewHistory(Limits{})))
	exchange := func(body string) (int, string) {
		response, err := http.Post(server.URL+"/api/session", "application/json", strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		defer response.Body.Close()
		var answer struct{ Token string }
		_ = json.NewDecoder(response.Body).Decode(&answer) // an error is text
		return response.StatusCode, answer.Token
	}
	for _, wrong := range []string{`{}`, `{"code":""}`, fmt.Sprintf(`{"code":%q}`, access.Token)} {
		if status, _ := exchange(wrong); status != http.StatusUnauthorized {
			t.Errorf("%s: %d", wrong, status)
		}
	}
	if status, _ := exchange("code"); status != http.StatusBadRequest {
		t.Errorf("no JSON: %d", status)
	}
	code := fmt.Sprintf(`{"code":%q}`, access.Code())
	if osruntime.GOOS == "linux" { // another user has read it on the browser's command line
		asked := -1
		access.ours = func(uid int) bool { asked = uid; return false }
		if status, token := exchange(code); status != http.StatusForbidden || token != "" || asked != os.Getuid() {
			t.Errorf("another user: %d, %q, user %d", status, token, asked)
		}
		access.ours = ours
	}
	if status, token := exchange(code); status != http.StatusOK || token != access.Token {
		t.Errorf("first: %d, %q", status, token)
	}
	if status, token := exchange(code); status != http.StatusUnauthorized || token != "" {
		t.Errorf("second: %d, %q", status, token)
	}
}

func TestUsersOf(t *testing.T) {
	const table = `  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 11 1 0 100 0 0 10 0
   1: 0100007F:1F90 0100007F:D431 01 00000000:00000000 00:00000000 00000000  1000        0 12 1 0 20 0 0 10 -1
   2: 0100007F:D431 0100007F:1F90 01 00000000:00000000 00:00000000 00000000  1001        0 13 1 0 20 0 0 10 -1
   3: 0100007F:D432 0100007F:1F90 01 00000000:00000000 00:00000000 00000000  1002        0 14 1 0 20 0 0 10 -1
`
	for _, tc := range []struct {
		from int
		want []int
	}{{0xd431, []int{1001}}, {0xd432, []int{1002}}, {0xd433, nil}} {
		if diff := cmp.Diff(tc.want, usersOf(table, tc.from, 0x1f90)); diff != "" {
			t.Errorf("port %d: %s", tc.from, diff)
		}
	}
	if !ours(os.Getuid()) || !ours(0) || ours(os.Getuid()+1) {
		t.Error("ours")
	}
}

// viewer is a browser: it reads a stream, and shows what it has read.
type viewer struct {
	t      *testing.T
	body   io.Closer
	lines  *bufio.Scanner
	status Status
	id     string
	shown  map[string]string
	events int
	fulls  int
}

func open(t *testing.T, url, token, lastID string) *viewer {
	t.Helper()
	response := request(t, url+"/api/stream", func(r *http.Request) {
		r.Header.Set("Authorization", "Bearer "+token)
		if lastID != "" {
			r.Header.Set("Last-Event-ID", lastID)
		}
	})
	if response.StatusCode != http.StatusOK || response.Header.Get("Content-Type") != "text/event-stream" {
		t.Fatalf("%s", response.Status)
	}
	lines := bufio.NewScanner(response.Body)
	lines.Buffer(nil, 64<<20)
	return &viewer{t: t, body: response.Body, lines: lines, shown: map[string]string{}}
}

// until reads events until the viewer shows what is wanted.
func (v *viewer) until(done func() bool) {
	v.t.Helper()
	name, id := "", ""
	for !done() {
		if !v.lines.Scan() {
			v.t.Fatalf("the stream ends: %v, with %v", v.lines.Err(), v.shown)
		}
		field, text, _ := strings.Cut(v.lines.Text(), ": ")
		switch field {
		case "event":
			name, id = text, ""
			v.events++
		case "id":
			id = text
		case "data":
			v.take(name, id, text)
		}
	}
}

func (v *viewer) take(name, id, data string) {
	v.t.Helper()
	switch name {
	case "status":
		v.status = Status{}
		if err := json.Unmarshal([]byte(data), &v.status); err != nil {
			v.t.Fatal(err)
		}
	case "change":
		var change struct {
			Version     int64
			Full, More  bool
			Nodes, Pods map[string]json.RawMessage
		}
		if err := json.Unmarshal([]byte(data), &change); err != nil {
			v.t.Fatalf("%s: %v", data, err)
		}
		if change.Full {
			v.fulls++
			clear(v.shown)
		}
		for _, things := range []map[string]json.RawMessage{change.Nodes, change.Pods} {
			for name, value := range things {
				if v.shown[name] = string(value); string(value) == "null" {
					delete(v.shown, name)
				}
			}
		}
		if change.More != (id == "") || !change.More && id != fmt.Sprint(change.Version) {
			v.t.Errorf("ID %q of version %d, more: %t", id, change.Version, change.More)
		}
		if id != "" {
			v.id = id
		}
	}
}

// Two browsers are told the same; one that comes back goes on where it was, or begins anew if that is forgotten.
func TestStream(t *testing.T) {
	history := NewHistory(Limits{Age: time.Hour, Bytes: 4000})
	feed := NewFeed(history)
	server, access := serve(t, feed)
	first := open(t, server.URL, access.Token, "")
	first.until(func() bool { return first.events == 2 }) // title and status come before the cluster is read
	history.Commit(start, map[Key]Value{{Node, "a"}: value("1"), {Pod, "ns/p"}: value(`{}`)})
	first.until(func() bool { return first.shown["a"] == "[1]" && first.shown["ns/p"] == "[{}]" })
	second := open(t, server.URL, access.Token, "")
	second.until(func() bool { return second.shown["a"] == "[1]" })
	history.Commit(start, map[Key]Value{{Node, "a"}: value("2", "3"), {Pod, "ns/p"}: nil})
	for _, v := range []*viewer{first, second} {
		v.until(func() bool { return v.shown["a"] == "[2,3]" && v.shown["ns/p"] == "" })
		if v.fulls != 1 {
			t.Errorf("told everything %d times", v.fulls)
		}
	}
	first.body.Close()
	history.Commit(start, map[Key]Value{{Node, "b"}: value("4")})
	history.Commit(start, map[Key]Value{{Node, "c"}: value("5")})
	again := open(t, server.URL, access.Token, first.id)
	again.until(func() bool { return again.shown["b"] == "[4]" && again.shown["c"] == "[5]" })
	if again.fulls != 0 || again.shown["a"] != "" || again.events != 3 {
		t.Errorf("after a pause: %d times everything, %d events, %v", again.fulls, again.events, again.shown)
	}
	for i := range 20 {
		history.Commit(start, map[Key]Value{{Node, "c"}: value(fmt.Sprintf("%q", strings.Repeat("x", 500+i)))})
	}
	late := open(t, server.URL, access.Token, first.id)
	late.until(func() bool { return late.shown["a"] == "[2,3]" && late.shown["b"] == "[4]" })
	if late.fulls != 1 {
		t.Errorf("after a long pause: %d times everything", late.fulls)
	}
	if response := request(t, server.URL+"/api/stream", func(r *http.Request) {
		r.Header.Set("Authorization", "Bearer "+access.Token)
		r.Header.Set("Last-Event-ID", "-1")
	}); response.StatusCode != http.StatusBadRequest {
		t.Errorf("a version that is none: %s", response.Status)
	}
}

// The server is started anew while pages are open: what they have of the process before is void, in streams and for the time slider.
func TestARestart(t *testing.T) {
	run := func(commits ...map[Key]Value) (*httptest.Server, *Access) {
		history := NewHistory(Limits{Age: time.Hour, Bytes: 1 << 20})
		for _, values := range commits {
			history.Commit(start, values)
		}
		return serve(t, NewFeed(history))
	}
	before, access := run(map[Key]Value{{Node, "gone"}: value("1"), {Node, "a"}: value("1")}, map[Key]Value{{Node, "b"}: value("1")})
	v := open(t, before.URL, access.Token, "")
	v.until(func() bool { return v.id != "" })
	after, access := run(map[Key]Value{{Node, "a"}: value("2")}, map[Key]Value{{Node, "b"}: value("2")}, map[Key]Value{{Node, "b"}: value("1")})
	again := open(t, after.URL, access.Token, v.id)
	again.until(func() bool { return again.id != "" })
	if again.fulls != 1 || again.shown["a"] != "[2]" || again.shown["b"] != "[1]" {
		t.Errorf("the stream after version %s: %d times everything, %v", v.id, again.fulls, again.shown)
	}
	response := request(t, fmt.Sprintf("%s/api/at?from=%s&time=%d", after.URL, v.id, start.UnixMilli()), func(r *http.Request) {
		r.Header.Set("Authorization", "Bearer "+access.Token)
	})
	if body, err := io.ReadAll(response.Body); err != nil || !strings.Contains(string(body), `"full":true`) || !strings.Contains(string(body), `"a":[2]`) {
		t.Errorf("the slider after version %s: %v %s", v.id, err, body)
	}
}

// once admits for the first time, and not again.
type once struct{ asked bool }

func (o *once) admit(*http.Request) (string, *refusal) {
	if o.asked {
		return "", &refusal{status: http.StatusUnauthorized}
	}
	o.asked = true
	return "a", nil
}

func (*once) foreign(*http.Request) error { return nil }

// slowly is a browser that takes its time for each event.
type slowly struct {
	http.ResponseWriter
	takes  time.Duration
	events int
}

func (s *slowly) Write(text []byte) (int, error) {
	s.events++
	time.Sleep(s.takes)
	return len(text), nil
}

func (*slowly) Flush() {}

// A reader who reads a large cluster slowly is told nothing any more soon after it lost its rights.
func TestASlowReaderIsLookedAt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		history := NewHistory(Limits{Age: time.Hour, Bytes: 1 << 30})
		values := map[Key]Value{}
		for i := range 20 * pageValues {
			values[Key{Node, strconv.Itoa(i)}] = Value{[]byte(`{}`)}
		}
		history.Commit(time.Now(), values)
		s := NewServer(Title{}, NewFeed(history), &once{}, nil)
		to := &slowly{ResponseWriter: httptest.NewRecorder(), takes: s.beat / 2}
		s.ServeHTTP(to, httptest.NewRequest(http.MethodGet, "/api/stream", nil))
		if to.events < 2 || to.events > 5 {
			t.Errorf("it was told %d events of which each took half a beat", to.events)
		}
	})
}

// A large cluster comes in parts, and a browser that has lost one of them begins anew.
func TestStreamOfALargeCluster(t *testing.T) {
	feed := NewFeed(NewHistory(Limits{Age: time.Hour, Bytes: 1 << 20}))
	if err := feed.Fill(snapshottest.New(450, 8).Snapshot()); err != nil {
		t.Fatal(err)
	}
	server, access := serve(t, feed)
	v := open(t, server.URL, access.Token, "")
	v.until(func() bool { return len(v.shown) > 0 })
	if len(v.shown) != pageValues || v.id != "" {
		t.Errorf("first %d nodes, ID %q", len(v.shown), v.id)
	}
	v.until(func() bool { return v.id != "" })
	if len(v.shown) != 450 || v.fulls != 1 || !v.status.Ready {
		t.Errorf("%d nodes, %d times everything, status %+v", len(v.shown), v.fulls, v.status)
	}
}

// Browsers are told that the API server does not answer, and that it does again; and that something comes when nothing changes.
func TestStatus(t *testing.T) {
	feed := NewFeed(NewHistory(Limits{Age: time.Hour, Bytes: 1 << 20}))
	feed.now = func() time.Time { return start }
	server, access := serve(t, feed, func(s *Server) { s.beat = time.Millisecond })
	v := open(t, server.URL, access.Token, "")
	feed.Reachable("pods", errors.New("connection refused"))
	feed.Reachable("resourceslices", errors.New("connection refused"))
	v.until(func() bool { return v.status.Unreachable != "" })
	if got := v.status; got.Unreachable != "pods: connection refused" || !got.Since.Time.Equal(start) {
		t.Errorf("%+v", got)
	}
	feed.Reachable("pods", nil)
	v.until(func() bool { return v.status.Unreachable == "resourceslices: connection refused" })
	feed.Reachable("resourceslices", nil)
	v.until(func() bool { return v.status.Unreachable == "" })
	if v.status.Since != nil {
		t.Errorf("%+v", v.status)
	}
	for v.lines.Scan() && v.lines.Text() != ": still here" {
	}
	if err := v.lines.Err(); err != nil {
		t.Error(err)
	}
}

// The time slider is told what is different from what it has.
func TestAt(t *testing.T) {
	history := fromOne(Limits{Age: time.Hour, Bytes: 1 << 20})
	for i := range 4 {
		history.Commit(start.Add(time.Duration(i)*time.Minute), map[Key]Value{
			{Node, fmt.Sprint("n", i)}: value(fmt.Sprint(i)), {Node, "all"}: value(fmt.Sprint(i)),
		})
	}
	server, access := serve(t, NewFeed(history))
	for name, tc := range map[string]struct {
		from    int
		minutes float64
		want    string
	}{
		"back":            {4, 1.5, `{"version":2,"time":1767312060000,"oldest":1,"full":false,"more":false,"nodes":{"all":[1],"n2":null,"n3":null},"pods":{}}`},
		"forward":         {1, 1, `{"version":2,"time":1767312060000,"oldest":1,"full":false,"more":false,"nodes":{"all":[1],"n1":[1]},"pods":{}}`},
		"nowhere":         {3, 2.9, `{"version":3,"time":1767312120000,"oldest":1,"full":false,"more":false,"nodes":{},"pods":{}}`},
		"before it all":   {2, -9, `{"version":1,"time":1767312000000,"oldest":1,"full":false,"more":false,"nodes":{"all":[0],"n1":null},"pods":{}}`},
		"from nothing":    {0, 0, `{"version":1,"time":1767312000000,"oldest":1,"full":true,"more":false,"nodes":{"all":[0],"n0":[0]},"pods":{}}`},
		"from the future": {9, 0, `{"version":1,"time":1767312000000,"oldest":1,"full":true,"more":false,"nodes":{"all":[0],"n0":[0]},"pods":{}}`},
	} {
		t.Run(name, func(t *testing.T) {
			when := start.Add(time.Duration(tc.minutes * float64(time.Minute))).UnixMilli()
			response := request(t, fmt.Sprintf("%s/api/at?from=%d&time=%d", server.URL, tc.from, when), func(r *http.Request) {
				r.Header.Set("Authorization", "Bearer "+access.Token)
			})
			body, err := io.ReadAll(response.Body)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tc.want, string(body)); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// A cluster is followed; what may not be read is told.
func TestFollow(t *testing.T) {
	c := snapshottest.New(1, 1)
	c.Pod("ns", "waits", 1, 0)
	var objects []runtime.Object
	for object := range c.All() {
		objects = append(objects, object)
	}
	client := fake.NewSimpleClientset(objects...)
	client.PrependReactor("list", "devicetaintrules", func(clienttesting.Action) (bool, runtime.Object, error) {
		return true, nil, apierrors.NewForbidden(schema.GroupResource{Resource: "devicetaintrules"}, "", nil)
	})
	feed := NewFeed(NewHistory(Limits{Age: time.Hour, Bytes: 1 << 20}))
	server, access := serve(t, feed)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- feed.Follow(ctx, client) }()
	v := open(t, server.URL, access.Token, "")
	v.until(func() bool { return v.shown["worker-0"] != "" && v.shown["ns/waits"] != "" && v.status.Ready })
	if got := v.status.Missing; len(got) != 1 || got[0].Resource != "devicetaintrules.resource.k8s.io" {
		t.Errorf("missing %v", got)
	}
	if err := client.CoreV1().Pods("ns").Delete(ctx, "waits", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	v.until(func() bool { return v.shown["ns/waits"] == "" })
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("it ends with %v", err)
	}
}

// A snapshot that lacks a kind says so.
func TestFillTellsWhatIsMissing(t *testing.T) {
	feed := NewFeed(NewHistory(Limits{Age: time.Hour, Bytes: 1 << 20}))
	s := snapshottest.New(1, 1).Snapshot()
	s.Missing = []snapshot.Missing{{Resource: "devicetaintrules.resource.k8s.io", Reason: "forbidden"}}
	if err := feed.Fill(s); err != nil {
		t.Fatal(err)
	}
	if status, _ := feed.Status(); !status.Ready || len(status.Missing) != 1 {
		t.Errorf("%+v", status)
	}
	if last, _ := feed.history.Last(); !last.Time.Equal(snapshottest.Now.Time) {
		t.Errorf("%+v", last)
	}
}

// Others on the machine can connect, and cannot hold a connection; a stream is not cut by the limits that are for them.
func TestConnectionsWithoutATokenEnd(t *testing.T) {
	const limit = 300 * time.Millisecond
	access := NewAccess()
	feed := NewFeed(NewHistory(Limits{Age: time.Hour, Bytes: 1 << 20}))
	s := NewServer(Title{Cluster: "test", Version: "v0"}, feed, access, func(ctx context.Context, _, _ string) ([]Line, error) {
		select { // a large cluster takes longer than the limit
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(2 * limit):
			return []Line{{Text: "late"}}, nil
		}
	})
	server := httptest.NewUnstartedServer(s)
	server.Config = s.HTTP(limit)
	server.Start()
	t.Cleanup(server.Close)
	stream := open(t, server.URL, access.Token, "")
	for name, text := range map[string]string{
		"nothing":         "",
		"half a header":   "GET / HTTP/1.1\r\nHost: local",
		"half a body":     "POST /api/session HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{",
		"body of a GET":   "GET /api/stream HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n",
		"a second one":    "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
		"of another name": "POST / HTTP/1.1\r\nHost: evil.example\r\nContent-Length: 100\r\n\r\n{",
	} {
		t.Run(name, func(t *testing.T) {
			connection, err := net.Dial("tcp", server.Listener.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			defer connection.Close()
			if _, err := connection.Write([]byte(text)); err != nil {
				t.Fatal(err)
			}
			if err := connection.SetReadDeadline(time.Now().Add(10 * time.Second)); err != nil {
				t.Fatal(err)
			}
			if _, err := io.Copy(io.Discard, connection); errors.Is(err, os.ErrDeadlineExceeded) {
				t.Error("it is held")
			}
		})
	}
	feed.history.Commit(time.Now(), map[Key]Value{{Node, "a"}: value("1")})
	stream.until(func() bool { return len(stream.shown) == 1 })
	answer := request(t, server.URL+"/api/why?namespace=a&pod=b", func(r *http.Request) { r.Header.Set("Authorization", "Bearer "+access.Token) })
	if body, err := io.ReadAll(answer.Body); err != nil || !strings.Contains(string(body), "late") {
		t.Errorf("%v: %s %s", err, answer.Status, body)
	}
}

// An answer that takes too long ends, so that others get theirs.
func TestAnAnswerThatTakesTooLong(t *testing.T) {
	server, access := serve(t, NewFeed(NewHistory(Limits{})), func(s *Server) {
		s.answering = 50 * time.Millisecond
		s.why = func(ctx context.Context, _, pod string) ([]Line, error) {
			if pod == "quick" {
				return []Line{{Text: "quick waits."}}, nil
			}
			<-ctx.Done()
			return nil, fmt.Errorf("pod %s: %w", pod, ctx.Err())
		}
	})
	for _, tc := range []struct{ pod, want string }{{"slow", "no answer within 50ms"}, {"quick", "quick waits."}} {
		answer := request(t, server.URL+"/api/why?namespace=a&pod="+tc.pod, func(r *http.Request) { r.Header.Set("Authorization", "Bearer "+access.Token) })
		if body, err := io.ReadAll(answer.Body); err != nil || !strings.Contains(string(body), tc.want) {
			t.Errorf("%s: %v: %s %s", tc.pod, err, answer.Status, body)
		}
	}
}
