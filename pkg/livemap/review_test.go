// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package livemap

import (
	"bufio"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	osruntime "runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	authentication "k8s.io/api/authentication/v1"
	authorization "k8s.io/api/authorization/v1"
	rbac "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/rest"
	clienttesting "k8s.io/client-go/testing"
	"sigs.k8s.io/yaml"
)

// reviewer is an API server that knows tokens: "reader" and "other" may list all, "poor" and "poor-..." no claims, and "down" is answered by an error. It counts
// the reviews of tokens.
func reviewer() (*fake.Clientset, *atomic.Int32) {
	asked := &atomic.Int32{}
	client := fake.NewSimpleClientset()
	client.PrependReactor("create", "tokenreviews", func(action clienttesting.Action) (bool, runtime.Object, error) {
		asked.Add(1)
		review := action.(clienttesting.CreateAction).GetObject().(*authentication.TokenReview).DeepCopy()
		switch token, _, _ := strings.Cut(review.Spec.Token, "-"); token {
		case "down":
			return true, nil, errors.New("no answer")
		case "reader", "other", "poor", "gone":
			review.Status = authentication.TokenReviewStatus{Authenticated: true, User: authentication.UserInfo{Username: token, Groups: []string{"people"}}}
			if token == "gone" && asked.Load() > 1 {
				review.Status = authentication.TokenReviewStatus{}
			}
		}
		return true, review, nil
	})
	client.PrependReactor("create", "subjectaccessreviews", func(action clienttesting.Action) (bool, runtime.Object, error) {
		review := action.(clienttesting.CreateAction).GetObject().(*authorization.SubjectAccessReview).DeepCopy()
		of := review.Spec.ResourceAttributes
		review.Status.Allowed = of.Verb == "list" && of.Namespace == "" && len(review.Spec.Groups) == 1 &&
			(review.Spec.User != "poor" || of.Resource != "resourceclaims")
		return true, review, nil
	})
	return client, asked
}

func reviewed(t *testing.T, clock func() time.Time, beat time.Duration) (*httptest.Server, *atomic.Int32) {
	t.Helper()
	client, asked := reviewer()
	review := NewReview(client)
	if clock != nil {
		review.now = clock
	}
	s := NewServer(Title{Cluster: "test"}, NewFeed(NewHistory(Limits{})), review, nil)
	s.beat = beat
	server := httptest.NewServer(s)
	t.Cleanup(server.Close)
	return server, asked
}

// In a cluster those are told of it whom the API server knows, and lets list what the map shows. Pages of others are not, whatever token they have.
func TestReview(t *testing.T) {
	server, _ := reviewed(t, nil, time.Minute)
	for name, tc := range map[string]struct {
		method, path, token, host, origin, site, mode, dest, says string
		want                                                      int
	}{
		"the page":               {path: "/", want: 200},
		"the page by a name":     {path: "/", host: "map.example.com", want: 200},
		"no token":               {path: "/api/stream", want: 401, says: "a token of the cluster is missing"},
		"an empty one":           {path: "/api/stream", token: " ", want: 401, says: "a token of the cluster is missing"},
		"a strange one":          {path: "/api/stream", token: "strange", want: 401, says: "does not know the token"},
		"one and more":           {path: "/api/stream", token: "reader 7", want: 401, says: "white space"},
		"without a right":        {path: "/api/stream", token: "poor", want: 403, says: "poor may not list resourceclaims.resource.k8s.io in all namespaces"},
		"no answer":              {path: "/api/stream", token: "down", want: 503, says: "no answer"},
		"a reader":               {path: "/api/stream", token: "reader", want: 200, says: "event: title"},
		"a reader by a name":     {path: "/api/stream", token: "reader", host: "map.example.com", origin: "https://map.example.com", site: "same-origin", want: 200},
		"from another page":      {path: "/api/stream", token: "reader", origin: "https://evil.example.com", want: 403, says: "its own page"},
		"from another site":      {path: "/api/stream", token: "reader", site: "cross-site", want: 403, says: "another site"},
		"a link of a wiki":       {path: "/", site: "cross-site", mode: "navigate", dest: "document", want: 200},
		"a frame of a wiki":      {path: "/", site: "cross-site", mode: "navigate", dest: "iframe", want: 403},
		"a script of a wiki":     {path: "/map.js", site: "cross-site", mode: "no-cors", dest: "script", want: 403},
		"a link to the API":      {path: "/api/stream", token: "reader", site: "cross-site", mode: "navigate", dest: "document", want: 403},
		"no code for the secret": {method: http.MethodPost, path: "/api/session", want: 405},
	} {
		t.Run(name, func(t *testing.T) {
			response := request(t, server.URL+tc.path, func(r *http.Request) {
				for header, value := range map[string]string{
					"Origin": tc.origin, "Sec-Fetch-Site": tc.site, "Sec-Fetch-Mode": tc.mode, "Sec-Fetch-Dest": tc.dest,
				} {
					if value != "" {
						r.Header.Set(header, value)
					}
				}
				if tc.token != "" {
					r.Header.Set("Authorization", "Bearer "+tc.token)
				}
				if r.Method = http.MethodGet; tc.method != "" {
					r.Method = tc.method
				}
				if tc.host != "" {
					r.Host = tc.host
				}
			})
			text := make([]byte, 500)
			n, _ := response.Body.Read(text)
			if response.StatusCode != tc.want || !strings.Contains(string(text[:n]), tc.says) {
				t.Errorf("%d %s, want %d with %q", response.StatusCode, text[:n], tc.want, tc.says)
			}
			if (response.StatusCode == 401) != (response.Header.Get("WWW-Authenticate") == "Bearer") {
				t.Errorf("%d with WWW-Authenticate %q", response.StatusCode, response.Header.Get("WWW-Authenticate"))
			}
		})
	}
}

// What the API server has said of a token is believed for a while, and no longer. That it did not answer is not kept.
func TestReviewsAreKeptForAWhile(t *testing.T) {
	now := time.Unix(0, 0)
	server, asked := reviewed(t, func() time.Time { return now }, time.Minute)
	ask := func(token string, want int) {
		t.Helper()
		response := request(t, server.URL+"/api/at", func(r *http.Request) { r.Header.Set("Authorization", "Bearer "+token) })
		if response.StatusCode != want {
			t.Errorf("token %s: %d, want %d", token, response.StatusCode, want)
		}
	}
	for i, tc := range []struct {
		after time.Duration
		token string
		want  int
		asked int32
	}{
		{0, "gone", 400, 1},
		{reviewAge - 1, "gone", 400, 1},
		{1, "gone", 401, 2},
		{0, "gone", 401, 2},
		{0, "poor", 403, 3},
		{0, "poor", 403, 3},
		{0, "down", 503, 4},
		{0, "down", 503, 5},
	} {
		now = now.Add(tc.after)
		if ask(tc.token, tc.want); asked.Load() != tc.asked {
			t.Errorf("step %d: the API server was asked %d times, want %d", i, asked.Load(), tc.asked)
		}
	}
}

// Who sends tokens without end has the API server asked about few of them, and keeps nobody out whose token is known.
func TestAFloodOfTokens(t *testing.T) {
	now := time.Unix(0, 0)
	server, asked := reviewed(t, func() time.Time { return now }, time.Minute)
	ask := func(token string) int {
		return request(t, server.URL+"/api/at", func(r *http.Request) { r.Header.Set("Authorization", "Bearer "+token) }).StatusCode
	}
	if got := ask("reader"); got != 400 {
		t.Fatalf("a reader: %d", got)
	}
	answers := map[int]int{}
	for i := range 50 {
		answers[ask(fmt.Sprint("strange-", i))]++
	}
	if asked.Load() != strangersBurst || answers[401] != strangersBurst-1 || answers[503] != 51-strangersBurst {
		t.Errorf("the API server was asked %d times, answers %v", asked.Load(), answers)
	}
	if got := ask("reader"); got != 400 {
		t.Errorf("a reader who is known: %d", got)
	}
	now = now.Add(reviewAge) // it is asked about again, whatever strangers send
	for i := range 50 {
		ask(fmt.Sprint("later-", i))
	}
	before := asked.Load()
	if got := ask("reader"); got != 400 || asked.Load() != before+1 {
		t.Errorf("a reader who is to be asked about again: %d", got)
	}
	now = now.Add(time.Second / strangersRate)
	if got := ask("poor"); got != 403 {
		t.Errorf("one later: %d", got)
	}
}

// Who is known and may not see the map is asked about no more often than who is not known, however many tokens it has.
func TestAFloodOfTokensOfOneWithoutRights(t *testing.T) {
	client, asked := reviewer()
	review := NewReview(client)
	now := time.Unix(0, 0)
	review.now = func() time.Time { return now }
	s := NewServer(Title{}, NewFeed(NewHistory(Limits{})), review, nil)
	tokens := 3 * strangersBurst
	for i := range tokens {
		now = now.Add(time.Second / strangersRate)
		if code := bearer(s, "10.0.0.1:1", fmt.Sprint("poor-", i)); code != 403 {
			t.Fatalf("token %d: %d", i, code)
		}
	}
	now = now.Add(reviewAge)
	asked.Store(0)
	answers := map[int]int{}
	for i := range tokens {
		answers[bearer(s, "10.0.0.1:1", fmt.Sprint("poor-", i))]++
	}
	if asked.Load() != strangersBurst || answers[403] != strangersBurst || answers[503] != tokens-strangersBurst {
		t.Errorf("the API server was asked %d times, answers %v", asked.Load(), answers)
	}
}

// bearer asks a server from an address with a token.
func bearer(s http.Handler, address, token string) int {
	r := httptest.NewRequest(http.MethodGet, "/api/at", nil)
	r.RemoteAddr = address
	r.Header.Set("Authorization", "Bearer "+token)
	w := httptest.NewRecorder()
	s.ServeHTTP(w, r)
	return w.Code
}

// A flood of tokens keeps nobody out who comes from another address.
func TestAFloodFromOneAddress(t *testing.T) {
	client, _ := reviewer()
	review := NewReview(client)
	review.now = func() time.Time { return time.Unix(0, 0) }
	s := NewServer(Title{}, NewFeed(NewHistory(Limits{})), review, nil)
	for i := range 50 {
		bearer(s, fmt.Sprintf("[2001:db8::%x]:99", i), fmt.Sprint("strange-", i))
		bearer(s, "10.0.0.1:99", fmt.Sprint("strange-4-", i))
	}
	for address, want := range map[string]int{"10.0.0.1:100": 503, "[2001:db8::ffff]:100": 503, "10.0.0.2:99": 400, "[2001:db8:0:1::1]:99": 400} {
		if got := bearer(s, address, "reader"); got != want {
			t.Errorf("a reader at %s: %d, want %d", address, got, want)
		}
		delete(review.known, sha256.Sum256([]byte("reader")))
	}
}

// waitingReviews is a server whose API server has the reviews of junk wait until released, and counts them.
func waitingReviews(t *testing.T) (s *Server, asked *atomic.Int32, release func()) {
	asked = &atomic.Int32{}
	held := make(chan struct{})
	release = sync.OnceFunc(func() { close(held) })
	api := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		if !strings.HasSuffix(r.URL.Path, "/tokenreviews") {
			_, _ = io.WriteString(w, `{"apiVersion":"authorization.k8s.io/v1","kind":"SubjectAccessReview","status":{"allowed":true}}`)
			return
		}
		var review authentication.TokenReview
		asked.Add(1)
		if err := json.NewDecoder(r.Body).Decode(&review); err != nil {
			t.Error(err)
		}
		if strings.HasPrefix(review.Spec.Token, "strange") {
			<-held
		} else {
			review.Status = authentication.TokenReviewStatus{Authenticated: true, User: authentication.UserInfo{Username: "a"}}
		}
		_ = json.NewEncoder(w).Encode(&review)
	}))
	t.Cleanup(api.Close)
	t.Cleanup(release)
	config := &rest.Config{Host: api.URL, QPS: -1, ContentConfig: rest.ContentConfig{ContentType: "application/json", AcceptContentTypes: "application/json"}}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	return NewServer(Title{}, NewFeed(NewHistory(Limits{})), NewReview(client), nil), asked, release
}

// While the API server is slow, strangers have few questions open, at an address and in all; and a token has one, however many bring it.
func TestQuestionsAtOnce(t *testing.T) {
	for name, tc := range map[string]struct {
		n              int
		address, token string // # is the number
		asked          int32
		answers        map[int]int
		reader         int
	}{
		"tokens from an address":     {60, "10.0.0.1:#", "strange-#", strangersAsking, map[int]int{503: 60 - strangersAsking, 401: strangersAsking}, 400},
		"tokens from many addresses": {60, "10.0.0.#:1", "strange-#", maxAsking, map[int]int{503: 60 - maxAsking, 401: maxAsking}, 503},
		"a token":                    {60, "10.0.0.1:#", "strange", 1, map[int]int{401: 60}, 400},
	} {
		t.Run(name, func(t *testing.T) {
			s, asked, release := waitingReviews(t)
			answers := make(chan int, tc.n)
			for i := range tc.n {
				number := strings.NewReplacer("#", fmt.Sprint(i))
				go func() { answers <- bearer(s, number.Replace(tc.address), number.Replace(tc.token)) }()
			}
			got := map[int]int{}
			for range tc.answers[503] {
				got[<-answers]++
			}
			if tc.answers[503] == 0 { // let all of them come
				for deadline := time.Now().Add(10 * time.Second); asked.Load() == 0 && time.Now().Before(deadline); {
					osruntime.Gosched()
				}
			}
			if code := bearer(s, "10.0.1.1:1", "reader"); code != tc.reader {
				t.Errorf("a reader at another address: %d, want %d", code, tc.reader)
			}
			release()
			for range tc.n - tc.answers[503] {
				got[<-answers]++
			}
			if code := bearer(s, "10.0.1.1:1", "reader"); code != 400 {
				t.Errorf("a reader later: %d", code)
			}
			if n := asked.Load() - 1; n != tc.asked || !maps.Equal(got, tc.answers) {
				t.Errorf("the API server was asked %d times, want %d, answers %v", n, tc.asked, got)
			}
		})
	}
}

// Readers have place among the answers that are kept, however many strangers there were.
func TestReadersAreKept(t *testing.T) {
	review := NewReview(nil)
	at := time.Unix(0, 0)
	for i := range maxReviews + 1 {
		review.keep([sha256.Size]byte{byte(i), byte(i >> 8), 1}, reviewOf("", at, &refusal{}))
	}
	reader := [sha256.Size]byte{}
	if review.keep(reader, reviewOf("a", at, nil)); review.lookup(reader).user.Username != "a" || len(review.known) != 1 {
		t.Errorf("the reader is not among %d", len(review.known))
	}
	for i := range maxReviews {
		review.keep([sha256.Size]byte{byte(i), byte(i >> 8), 1}, reviewOf("", at.Add(reviewAge), &refusal{}))
	}
	if review.lookup(reader).user.Username != "a" || len(review.known) != maxReviews {
		t.Errorf("the reader is not among %d", len(review.known))
	}
}

func reviewOf(user string, at time.Time, refused *refusal) review {
	return review{user: authentication.UserInfo{Username: user}, at: at, refusal: refused}
}

// A user's rights are asked about once a minute, each of those that manifests/kubectl/reader.yaml has, and at once if the token is
// another user's.
func TestRightsAreKeptForAMinute(t *testing.T) {
	client, _ := reviewer()
	var rights, lost atomic.Int32
	user := "reader"
	client.PrependReactor("create", "tokenreviews", func(action clienttesting.Action) (bool, runtime.Object, error) {
		review := action.(clienttesting.CreateAction).GetObject().(*authentication.TokenReview).DeepCopy()
		review.Status = authentication.TokenReviewStatus{Authenticated: true, User: authentication.UserInfo{Username: user, Groups: []string{"people"}}}
		return true, review, nil
	})
	client.PrependReactor("create", "subjectaccessreviews", func(action clienttesting.Action) (bool, runtime.Object, error) {
		return rights.Add(1) == lost.Load(), action.(clienttesting.CreateAction).GetObject(), nil
	})
	review := NewReview(client)
	now := time.Unix(0, 0)
	review.now = func() time.Time { return now }
	s := NewServer(Title{}, NewFeed(NewHistory(Limits{})), review, nil)
	all := int32(len(shown))
	for i, tc := range []struct {
		after        time.Duration
		user         string
		lost         int32 // the question that is answered by no
		want         int
		wantQuestion int32
	}{
		{0, "reader", all, 403, all},
		{reviewAge, "reader", 0, 400, all},
		{reviewAge, "reader", 1, 400, 0},
		{rightsAge - reviewAge - 1, "reader", 1, 400, 0},
		{reviewAge, "reader", 0, 400, all},
		{reviewAge, "another", 2, 403, 2},
		{reviewAge, "another", 0, 400, all},
	} {
		now, user = now.Add(tc.after), tc.user
		lost.Store(tc.lost)
		rights.Store(0)
		if got := bearer(s, "10.0.0.1:1", "token"); got != tc.want || rights.Load() != tc.wantQuestion {
			t.Errorf("step %d: %d after %d questions, want %d after %d", i, got, rights.Load(), tc.want, tc.wantQuestion)
		}
	}
}

// The rights that are asked about are those to list of the role that the manifests give to readers, and to the map itself.
func TestNobodyIsToldMoreThanByKubectl(t *testing.T) {
	file, err := os.ReadFile("../../manifests/kubectl/reader.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var role rbac.ClusterRole
	if err := yaml.UnmarshalStrict(file, &role); err != nil {
		t.Fatal(err)
	}
	var want []string
	for _, rule := range role.Rules {
		for _, resource := range rule.Resources {
			want = append(want, schema.GroupResource{Group: rule.APIGroups[0], Resource: resource}.String())
		}
	}
	var got []string
	for _, what := range shown {
		got = append(got, what.String())
	}
	slices.Sort(want)
	slices.Sort(got)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

// A stream goes on for a while when the API server does not answer, and ends at once when the map's own account may not ask.
func TestStreamsEndWithoutAnAnswer(t *testing.T) {
	for name, tc := range map[string]struct {
		err      error
		patience time.Duration
		ends     bool
	}{
		"no answer":                     {errors.New("no answer"), 0, true},
		"no answer, for a short time":   {errors.New("no answer"), time.Hour, false},
		"the own account has no right":  {apierrors.NewForbidden(schema.GroupResource{Resource: "tokenreviews"}, "", nil), time.Hour, true},
		"the own account has no token":  {apierrors.NewUnauthorized("expired"), time.Hour, true},
		"the API server has much to do": {apierrors.NewTooManyRequests("later", 1), time.Hour, false},
	} {
		t.Run(name, func(t *testing.T) {
			client, _ := reviewer()
			var asked atomic.Int32
			client.PrependReactor("create", "tokenreviews", func(clienttesting.Action) (bool, runtime.Object, error) {
				return asked.Add(1) > 1, nil, tc.err
			})
			review := NewReview(client)
			var passed atomic.Int64
			review.now = func() time.Time { return time.Unix(0, passed.Add(int64(reviewAge))) }
			s := NewServer(Title{}, NewFeed(NewHistory(Limits{})), review, nil)
			s.beat, s.patience = time.Millisecond, tc.patience
			server := httptest.NewServer(s)
			t.Cleanup(server.Close)
			response := request(t, server.URL+"/api/stream", func(r *http.Request) { r.Header.Set("Authorization", "Bearer reader") })
			for lines, beats := bufio.NewScanner(response.Body), 0; ; {
				if !lines.Scan() {
					if !tc.ends || lines.Err() != nil {
						t.Errorf("it ends after %d questions: %v", asked.Load(), lines.Err())
					}
					return
				}
				if lines.Text() == ": still here" {
					beats++
				}
				if beats == 5 {
					if tc.ends {
						t.Error("it goes on")
					}
					response.Body.Close()
					return
				}
			}
		})
	}
}

// Who has a stream is looked at again with each beat.
func TestAStreamEndsWithItsToken(t *testing.T) {
	var passed atomic.Int64
	server, asked := reviewed(t, func() time.Time { return time.Unix(0, passed.Add(int64(reviewAge))) }, time.Millisecond)
	response := request(t, server.URL+"/api/stream", func(r *http.Request) { r.Header.Set("Authorization", "Bearer gone") })
	lines := bufio.NewScanner(response.Body)
	for beats := 0; lines.Scan(); {
		if lines.Text() == ": still here" {
			beats++
		}
		if beats == 5 { // each with a review of the token, which is gone at the second
			t.Fatalf("it goes on after %d reviews", asked.Load())
		}
	}
	if lines.Err() != nil || response.StatusCode != http.StatusOK || asked.Load() != 2 {
		t.Errorf("%d, %v after %d reviews", response.StatusCode, lines.Err(), asked.Load())
	}
}
