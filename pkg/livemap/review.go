// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package livemap

import (
	"context"
	"crypto/sha256"
	"fmt"
	"maps"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
	"sync"
	"time"
	"unicode"

	"golang.org/x/sync/singleflight"
	"golang.org/x/time/rate"
	authentication "k8s.io/api/authentication/v1"
	authorization "k8s.io/api/authorization/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes"
)

const (
	// reviewAge is how long the answers of the API server about a token are believed. A stream is looked at again with each beat.
	reviewAge = 10 * time.Second
	// rightsAge is how long a user is believed to have the rights that it had.
	rightsAge = time.Minute
	// maxReviews bounds the tokens whose answers are kept.
	maxReviews = 1000
	// reviewTime bounds the questions about a token.
	reviewTime = 8 * time.Second

	// strangersRate and strangersBurst bound how many tokens a second that it has not known before the API server is asked about for an
	// address, strangersAsking how many at once. What strangers send is little load for it, and keeps nobody out who is known or comes
	// from elsewhere.
	strangersRate, strangersBurst, strangersAsking = 5, 20, 5
	// maxAsking bounds the questions about such tokens at once, of all addresses.
	maxAsking = 40
	// maxAddresses bounds the addresses that are kept.
	maxAddresses = 10_000

	// ReviewQPS and ReviewBurst are for the client of a [Review]: requests a second, and at once. A
	// token takes 1 request, and every minute 16.
	ReviewQPS, ReviewBurst = 100, 200
)

// shown is what a reader has to be allowed to list in all namespaces: all that the map and its answers to why are made of, as in
// manifests/kubectl/reader.yaml.
var shown = []schema.GroupResource{
	{Resource: "nodes"},
	{Resource: "pods"},
	{Group: "resource.k8s.io", Resource: "resourceslices"},
	{Group: "resource.k8s.io", Resource: "resourceclaims"},
	{Group: "resource.k8s.io", Resource: "devicetaintrules"},
	{Group: "resource.k8s.io", Resource: "deviceclasses"},
	{Group: "resource.k8s.io", Resource: "resourceclaimtemplates"},
	{Resource: "namespaces"},
	{Resource: "persistentvolumeclaims"},
	{Resource: "persistentvolumes"},
	{Group: "storage.k8s.io", Resource: "storageclasses"},
	{Group: "storage.k8s.io", Resource: "csinodes"},
	{Group: "policy", Resource: "poddisruptionbudgets"},
	{Group: "scheduling.k8s.io", Resource: "priorityclasses"},
	{Group: "scheduling.k8s.io", Resource: "podgroups"},
}

// Review admits whom the API server knows by their token (TokenReview) and lets list what the map shows (SubjectAccessReview). It is for a
// server in the cluster, which reads with an account of its own, and tells nobody more than kubectl would.
type Review struct {
	client kubernetes.Interface
	now    func() time.Time
	// asking has one review for all who bring a token at the same time.
	asking singleflight.Group

	mu        sync.Mutex
	known     map[[sha256.Size]byte]review
	addresses map[netip.Prefix]*address
	strangers int
}

// review is what the API server has said about a token.
type review struct {
	// user is whose it is, empty if nobody's.
	user    authentication.UserInfo
	refusal *refusal
	at      time.Time
	// rights is when the user was allowed all.
	rights time.Time
}

// address is where tokens come from that are not known.
type address struct {
	limit  *rate.Limiter
	asking int
}

// NewReview asks with the client, whose account needs to create TokenReviews and SubjectAccessReviews (ClusterRole system:auth-delegator).
// The client is for nothing else, so that no list waits before a review, and made with [ReviewQPS] and [ReviewBurst].
func NewReview(client kubernetes.Interface) *Review {
	return &Review{client: client, now: time.Now, known: map[[sha256.Size]byte]review{}, addresses: map[netip.Prefix]*address{}}
}

func (v *Review) admit(r *http.Request) (string, *refusal) {
	token, ok := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
	if token = strings.TrimSpace(token); !ok || token == "" {
		return "", &refusal{http.StatusUnauthorized, "a token of the cluster is missing: open this page with #token=TOKEN behind its address, " +
			"for example that of 'kubectl create token'"}
	}
	if strings.ContainsFunc(token, unicode.IsSpace) { // the API server would read what is before it: one token would be any number
		return "", &refusal{http.StatusUnauthorized, "the token has white space in it: open this page with #token=TOKEN behind its address"}
	}
	sum := sha256.Sum256([]byte(token))
	if known := v.lookup(sum); v.now().Sub(known.at) < reviewAge {
		return known.user.Username, known.refusal
	}
	asked := v.asking.DoChan(string(sum[:]), func() (any, error) { return v.review(sum, token, r.RemoteAddr), nil })
	select {
	case <-r.Context().Done():
		return "", &refusal{http.StatusServiceUnavailable, "nobody waits for the answer"}
	case answer := <-asked:
		got := answer.Val.(review)
		return got.user.Username, got.refusal
	}
}

// lookup is what is known of a token, which may be nothing, or too old to be believed.
func (v *Review) lookup(token [sha256.Size]byte) review {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.known[token]
}

// review asks about a token, and keeps the answer. Others may wait for it, too, so that it goes on when the sender is gone.
func (v *Review) review(sum [sha256.Size]byte, token, sender string) review {
	before := v.lookup(sum)
	if before.rights.IsZero() { // a stranger, or known and not admitted
		leave := v.enter(sender)
		if leave == nil {
			return review{refusal: &refusal{http.StatusServiceUnavailable, "too many tokens are to be asked about: try again"}}
		}
		defer leave()
	}
	ctx, cancel := context.WithTimeout(context.Background(), reviewTime)
	defer cancel()
	got := v.ask(ctx, token, before)
	if got.refusal == nil || got.refusal.status < http.StatusInternalServerError {
		v.keep(sum, got)
	}
	return got
}

// enter takes a place among the questions about tokens that are not known, and returns what gives it back; nil if there is none.
func (v *Review) enter(sender string) (leave func()) {
	var from netip.Prefix
	if of, err := netip.ParseAddrPort(sender); err == nil {
		ip, bits := of.Addr().Unmap().WithZone(""), 32
		if ip.Is6() {
			bits = 64 // one machine may have all of these
		}
		from = netip.PrefixFrom(ip, bits).Masked()
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	a := v.addresses[from]
	if a == nil {
		if len(v.addresses) >= maxAddresses {
			maps.DeleteFunc(v.addresses, func(_ netip.Prefix, a *address) bool {
				return a.asking == 0 && a.limit.TokensAt(v.now()) >= strangersBurst
			})
		}
		if len(v.addresses) >= maxAddresses {
			return nil
		}
		a = &address{limit: rate.NewLimiter(strangersRate, strangersBurst)}
		v.addresses[from] = a
	}
	if v.strangers >= maxAsking || a.asking >= strangersAsking || !a.limit.AllowN(v.now(), 1) {
		return nil
	}
	v.strangers++
	a.asking++
	return func() {
		v.mu.Lock()
		defer v.mu.Unlock()
		v.strangers--
		a.asking--
	}
}

// keep remembers an answer. Where there is no place it forgets those that are not believed any more, and refusals for who is admitted.
func (v *Review) keep(token [sha256.Size]byte, got review) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if _, again := v.known[token]; !again && len(v.known) >= maxReviews {
		maps.DeleteFunc(v.known, func(_ [sha256.Size]byte, other review) bool {
			age := got.at.Sub(other.at)
			return age >= rightsAge || other.refusal != nil && (age >= reviewAge || got.refusal == nil)
		})
		if len(v.known) >= maxReviews {
			return
		}
	}
	v.known[token] = got
}

// ask asks the API server whose token it is, and what that user may list.
func (v *Review) ask(ctx context.Context, token string, before review) review {
	asked, err := v.client.AuthenticationV1().TokenReviews().Create(ctx,
		&authentication.TokenReview{Spec: authentication.TokenReviewSpec{Token: token}}, metav1.CreateOptions{})
	if err != nil {
		return review{refusal: noAnswer("whose token it is", err)}
	}
	got := review{at: v.now()}
	if !asked.Status.Authenticated {
		got.refusal = &refusal{
			http.StatusUnauthorized,
			"the API server does not know the token, or it has expired: open this page with #token=TOKEN behind its address",
		}
		return got
	}
	got.user = asked.Status.User
	if got.at.Sub(before.rights) < rightsAge && equality.Semantic.DeepEqual(before.user, got.user) {
		got.rights = before.rights
		return got
	}
	got.refusal, got.rights = v.mayList(ctx, &got.user), got.at
	if got.refusal != nil {
		got.rights = time.Time{}
	}
	return got
}

// mayList tells why a user is not shown the map, nil if it may list all.
func (v *Review) mayList(ctx context.Context, user *authentication.UserInfo) *refusal {
	extra := map[string]authorization.ExtraValue{}
	for key, values := range user.Extra {
		extra[key] = authorization.ExtraValue(values)
	}
	for _, what := range shown {
		said, err := v.client.AuthorizationV1().SubjectAccessReviews().Create(ctx, &authorization.SubjectAccessReview{
			Spec: authorization.SubjectAccessReviewSpec{
				User: user.Username, UID: user.UID, Groups: user.Groups, Extra: extra,
				ResourceAttributes: &authorization.ResourceAttributes{Verb: "list", Group: what.Group, Resource: what.Resource},
			},
		}, metav1.CreateOptions{})
		if err != nil {
			return noAnswer("what "+user.Username+" may list", err)
		}
		if !said.Status.Allowed {
			return &refusal{
				http.StatusForbidden,
				fmt.Sprintf("%s may not list %s in all namespaces, of which the map tells: manifests/kubectl/reader.yaml has the rights",
					user.Username, what),
			}
		}
	}
	return nil
}

// noAnswer is for everybody: the API server does not answer, for which a stream waits a while, or does not let the map's own account ask,
// which ends it.
func noAnswer(what string, err error) *refusal {
	status := http.StatusServiceUnavailable
	if apierrors.IsForbidden(err) || apierrors.IsUnauthorized(err) {
		status = http.StatusInternalServerError
	}
	return &refusal{status, fmt.Sprintf("asking the API server %s, with the map's own account: %v", what, err)}
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
