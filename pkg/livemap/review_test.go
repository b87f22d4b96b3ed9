package livemap

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	authentication "k8s.io/api/authentication/v1"
	authorization "k8s.io/api/authorization/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
)

// reviewer is an API server that knows tokens: "reader" may list all, "poor" no claims, and "down" is answered by an error. It counts
// the reviews of tokens.
func reviewer() (*fake.Clientset, *atomic.Int32) {
	asked := &atomic.Int32{}
	client := fake.NewClientset()
	client.PrependReactor("create", "tokenreviews", func(action clienttesting.Action) (bool, runtime.Object, error) {
		asked.Add(1)
		review := action.(clienttesting.CreateAction).GetObject().(*authentication.TokenReview).DeepCopy()
		switch token := review.Spec.Token; token {
		case "down":
			return true, nil, errors.New("no answer")
		case "reader", "poor", "gone":
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
		path, token, host, origin, site, says string
		want                                  int
	}{
		"the page":               {path: "/", want: 200},
		"the page by a name":     {path: "/", host: "map.example.com", want: 200},
		"no token":               {path: "/api/stream", want: 401, says: "a token of the cluster is missing"},
		"an empty one":           {path: "/api/stream", token: " ", want: 401, says: "a token of the cluster is missing"},
		"a strange one":          {path: "/api/stream", token: "strange", want: 401, says: "does not know the token"},
		"without a right":        {path: "/api/stream", token: "poor", want: 403, says: "poor may not list resourceclaims.resource.k8s.io in all namespaces"},
		"no answer":              {path: "/api/stream", token: "down", want: 503, says: "no answer"},
		"a reader":               {path: "/api/stream", token: "reader", want: 200, says: "event: title"},
		"a reader by a name":     {path: "/api/stream", token: "reader", host: "map.example.com", origin: "https://map.example.com", site: "same-origin", want: 200},
		"from another page":      {path: "/api/stream", token: "reader", origin: "https://evil.example.com", want: 403, says: "its own page"},
		"from another site":      {path: "/api/stream", token: "reader", site: "cross-site", want: 403, says: "another site"},
		"no code for the secret": {path: "/api/session", want: 404},
	} {
		t.Run(name, func(t *testing.T) {
			response := request(t, server.URL+tc.path, func(r *http.Request) {
				for header, value := range map[string]string{"Origin": tc.origin, "Sec-Fetch-Site": tc.site} {
					if value != "" {
						r.Header.Set(header, value)
					}
				}
				if tc.token != "" {
					r.Header.Set("Authorization", "Bearer "+tc.token)
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
	if asked.Load() != reviewBurst || answers[401] != reviewBurst-1 || answers[503] != 51-reviewBurst {
		t.Errorf("the API server was asked %d times, answers %v", asked.Load(), answers)
	}
	if got := ask("reader"); got != 400 {
		t.Errorf("a reader who is known: %d", got)
	}
	now = now.Add(time.Second / reviewRate)
	if got := ask("poor"); got != 403 {
		t.Errorf("one later: %d", got)
	}
}

// Who has a stream is looked at again with each beat.
func TestAStreamEndsWithItsToken(t *testing.T) {
	var passed atomic.Int64
	server, asked := reviewed(t, func() time.Time { return time.Unix(0, passed.Add(int64(reviewAge))) }, time.Millisecond)
	response := request(t, server.URL+"/api/stream", func(r *http.Request) { r.Header.Set("Authorization", "Bearer gone") })
	if text, err := io.ReadAll(response.Body); err != nil || response.StatusCode != 200 || asked.Load() != 2 {
		t.Errorf("%d, %v after %d reviews: %s", response.StatusCode, err, asked.Load(), text)
	}
}
