package livemap

import (
	"context"
	"crypto/sha256"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"

	"golang.org/x/time/rate"
	authentication "k8s.io/api/authentication/v1"
	authorization "k8s.io/api/authorization/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
)

const (
	// reviewAge is how long the answers of the API server about a token are believed. A stream is looked at again with each beat.
	reviewAge = 10 * time.Second
	// maxReviews bounds the tokens whose answers are kept.
	maxReviews = 1000
	// reviewTime bounds the questions about a token.
	reviewTime = 8 * time.Second
	// reviewRate and reviewBurst bound how many tokens a second the API server is asked about: what strangers send is no load for it, and
	// leaves the map's account its requests.
	reviewRate, reviewBurst = 5, 20
)

// shown is what a reader has to be allowed to list in all namespaces: the map shows all of it.
var shown = []authorization.ResourceAttributes{
	{Resource: "nodes"},
	{Resource: "pods"},
	{Group: "resource.k8s.io", Resource: "resourceslices"},
	{Group: "resource.k8s.io", Resource: "resourceclaims"},
}

// Review admits whom the API server knows by their token (TokenReview) and lets list what the map shows (SubjectAccessReview). It is for a
// server in the cluster, which reads with an account of its own, and tells nobody more than kubectl would.
type Review struct {
	client kubernetes.Interface
	now    func() time.Time
	limit  *rate.Limiter

	mu    sync.Mutex
	known map[[sha256.Size]byte]review
}

// review is what the API server has said about a token.
type review struct {
	refusal *refusal
	at      time.Time
}

// NewReview asks with the client, whose account needs to create TokenReviews and SubjectAccessReviews (ClusterRole system:auth-delegator).
func NewReview(client kubernetes.Interface) *Review {
	return &Review{client: client, now: time.Now, limit: rate.NewLimiter(reviewRate, reviewBurst), known: map[[sha256.Size]byte]review{}}
}

func (v *Review) admit(r *http.Request) *refusal {
	token, ok := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
	if token = strings.TrimSpace(token); !ok || token == "" {
		return &refusal{http.StatusUnauthorized, "a token of the cluster is missing: open this page with #token=TOKEN behind its address, " +
			"for example that of 'kubectl create token'"}
	}
	sum := sha256.Sum256([]byte(token))
	v.mu.Lock()
	known, ok := v.known[sum]
	v.mu.Unlock()
	if ok && v.now().Sub(known.at) < reviewAge {
		return known.refusal
	}
	if !v.limit.AllowN(v.now(), 1) {
		return &refusal{http.StatusServiceUnavailable, "too many tokens are to be asked about: try again"}
	}
	ctx, cancel := context.WithTimeout(r.Context(), reviewTime)
	defer cancel()
	refused := v.ask(ctx, token)
	if refused == nil || refused.status < http.StatusInternalServerError {
		v.keep(sum, refused)
	}
	return refused
}

// keep remembers an answer, and forgets those that are not believed any more.
func (v *Review) keep(token [sha256.Size]byte, refused *refusal) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if len(v.known) >= maxReviews {
		for other, known := range v.known {
			if v.now().Sub(known.at) >= reviewAge {
				delete(v.known, other)
			}
		}
	}
	if len(v.known) < maxReviews {
		v.known[token] = review{refused, v.now()}
	}
}

// ask asks the API server whose token it is, and what that user may list.
func (v *Review) ask(ctx context.Context, token string) *refusal {
	asked, err := v.client.AuthenticationV1().TokenReviews().Create(ctx,
		&authentication.TokenReview{Spec: authentication.TokenReviewSpec{Token: token}}, metav1.CreateOptions{})
	if err != nil {
		return &refusal{http.StatusServiceUnavailable, fmt.Sprintf("asking the API server whose token it is: %v", err)}
	}
	if !asked.Status.Authenticated {
		return &refusal{http.StatusUnauthorized, "the API server does not know the token, or it has expired: open this page with #token=TOKEN behind its address"}
	}
	user := &asked.Status.User
	extra := map[string]authorization.ExtraValue{}
	for key, values := range user.Extra {
		extra[key] = authorization.ExtraValue(values)
	}
	for _, what := range shown {
		what.Verb = "list"
		said, err := v.client.AuthorizationV1().SubjectAccessReviews().Create(ctx, &authorization.SubjectAccessReview{
			Spec: authorization.SubjectAccessReviewSpec{
				User: user.Username, UID: user.UID, Groups: user.Groups, Extra: extra, ResourceAttributes: &what,
			},
		}, metav1.CreateOptions{})
		if err != nil {
			return &refusal{http.StatusServiceUnavailable, fmt.Sprintf("asking the API server what %s may list: %v", user.Username, err)}
		}
		if !said.Status.Allowed {
			return &refusal{http.StatusForbidden, fmt.Sprintf("%s may not list %s in all namespaces, which the map shows: manifests/kubectl/reader.yaml has the rights",
				user.Username, strings.TrimSuffix(what.Resource+"."+what.Group, "."))}
		}
	}
	return nil
}

// foreign tells why a request is not from a page of this server. Any host may lead here: no browser sends the token by itself.
func (v *Review) foreign(r *http.Request) error {
	if origin := r.Header.Get("Origin"); origin != "" {
		if of, err := url.Parse(origin); err != nil || of.Host != r.Host {
			return fmt.Errorf("origin %q: this server answers to its own page", origin)
		}
	}
	return otherSite(r)
}
