// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package rights

import (
	"cmp"
	"context"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/metrics"
	"k8s.io/component-helpers/auth/rbac/validation"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"stowage.dev/stowage/pkg/policies"
)

// How often the rights are looked at, and how much is asked.
const (
	// Retry is the pause while something is wrong or not known, Period the one while all is right. A refused call ends the latter.
	Retry  = 10 * time.Second
	Period = 5 * time.Minute
	// lookTimeout bounds one look.
	lookTimeout = 30 * time.Second
	// maxConfirmed is how many missing rights are confirmed and named in one look; further ones are counted only.
	maxConfirmed = 20
)

// Right is one verb on one resource, as a role grants it.
type Right struct {
	Verb, Group, Resource string
	// Namespace is empty for a right in all namespaces; Name is empty for all objects.
	Namespace, Name string
	// Role is what grants it in our manifests.
	Role string
}

// optional tells that pods are scheduled without the right, too: events only tell of it.
func (r Right) optional() bool { return r.Resource == "events" }

// String names the right by its verb, its resource with group and subresource, and where it is missing.
func (r Right) String() string {
	base, sub, found := strings.Cut(r.Resource, "/")
	text := r.Verb + " " + schema.GroupResource{Group: r.Group, Resource: base}.String()
	if found {
		text += "/" + sub
	}
	if r.Name != "" {
		text += " " + r.Name
	}
	if r.Namespace != "" {
		return text + " in namespace " + r.Namespace
	}
	return text + " in all namespaces"
}

// Denials tell that the API server has refused calls as forbidden, which may have another reason than a missing right, such as a quota, or
// as invalid: so it answers who writes an allocation without the right to update resourceclaims/binding.
type Denials chan struct{}

// NewDenials returns denials of which there is none yet.
func NewDenials() Denials { return make(Denials, 1) }

// Observe returns a metric of calls' results that passes them on to next, and notes those that were refused.
func (d Denials) Observe(next metrics.ResultMetric) metrics.ResultMetric {
	return observedResults{next, d}
}

type observedResults struct {
	next   metrics.ResultMetric
	denied Denials
}

// Increment implements [metrics.ResultMetric].
func (o observedResults) Increment(ctx context.Context, code, method, host string) {
	o.next.Increment(ctx, code, method, host)
	refused := code == strconv.Itoa(http.StatusForbidden) || code == strconv.Itoa(http.StatusUnprocessableEntity)
	if !refused || ctx.Value(refusalIsRight{}) != nil {
		return
	}
	select {
	case o.denied <- struct{}{}:
	default: // one is noted already
	}
}

// refusalIsRight is in the context of calls that must be refused.
type refusalIsRight struct{}

// Checker watches whether the scheduler may do what it has to do, and whether admission policies keep it from what it must not.
type Checker struct {
	client   kubernetes.Interface
	required []Right
	writes   []policies.Write
	clock    clock.Clock

	mu sync.Mutex
	// missing are the rights that the API server denied when it was last asked; user is who asked.
	missing []Right
	more    int
	// void are the writes that would pass, with the policies that forbid them.
	void []string
	user string
	// unanswered says in a word why the last look had no answer, empty if it had one.
	unanswered string
	// looked is closed when the first look has ended, with or without an answer, which sawOnce notes.
	looked  chan struct{}
	sawOnce func()
	denied  Denials
}

// NewChecker returns a checker of the rights that the client's user should have, and of the writes that it must not make. Run makes it
// look. Denials, which may be nil, tell it when a right may have been taken away.
func NewChecker(client kubernetes.Interface, required []Right, writes []policies.Write, clock clock.Clock, denied Denials) *Checker {
	registerMetrics()
	c := &Checker{client: client, required: required, writes: writes, clock: clock, looked: make(chan struct{}), denied: denied}
	c.sawOnce = sync.OnceFunc(func() { close(c.looked) })
	if len(required) == 0 {
		c.sawOnce()
	}
	return c
}

// Run looks at the rights until ctx ends.
func (c *Checker) Run(ctx context.Context) {
	if len(c.required) > 0 {
		c.setLastAnswer()
	}
	for len(c.required) > 0 {
		more := Period - Retry
		if c.Look(ctx) {
			more = 0
		}
		select {
		case <-ctx.Done():
			return
		case <-c.clock.After(Retry): // not more often, however many calls are refused
		}
		select {
		case <-ctx.Done():
			return
		case <-c.clock.After(more):
		case <-c.denied:
		}
	}
}

// Look asks the API server, and tells whether to ask again soon. What it does not answer is no missing right: then the
// findings of the look before stand.
func (c *Checker) Look(ctx context.Context) (again bool) {
	ctx, cancel := context.WithTimeout(ctx, lookTimeout)
	defer cancel()
	missing, more, err := c.ask(ctx)
	if err != nil {
		c.reportAnswer(klog.FromContext(ctx), err)
		c.sawOnce()
		return true
	}
	void, unknown := policies.Void(context.WithValue(ctx, refusalIsRight{}, true), c.client, c.writes)
	c.reportAnswer(klog.FromContext(ctx), unknown)
	user := ""
	if len(missing) > 0 || len(void) > 0 {
		user = c.whoAmI(ctx)
	}
	c.mu.Lock()
	if unknown != nil && len(void) == 0 {
		void = c.void // not known to be otherwise
	}
	changed := !slices.Equal(missing, c.missing) || more != c.more
	changedVoid := !slices.Equal(void, c.void)
	c.missing, c.more, c.void = missing, more, void
	if user != "" {
		c.user = user
	}
	c.sawOnce()
	c.mu.Unlock()
	needed := slices.ContainsFunc(missing, func(r Right) bool { return !r.optional() })
	logger := klog.FromContext(ctx)
	switch {
	case changed && needed:
		logger.Error(nil, "The scheduler lacks rights, it is not ready", "missing", c.Missing(), "user", user)
	case changed && len(missing) > 0:
		logger.Error(nil, "The scheduler lacks rights, it works without them", "missing", c.Missing(), "user", user)
	case changed:
		logger.Info("The scheduler has all rights that it needs")
	}
	switch {
	case changedVoid && len(void) > 0:
		logger.Error(nil, "The scheduler could write what it must not, it is not ready", "void", void, "user", user)
	case changedVoid:
		logger.Info("The admission policies are about the scheduler's account")
	}
	return needed || len(void) > 0 || unknown != nil
}

// reportAnswer notes whether a look had an answer, and logs it when that changes.
func (c *Checker) reportAnswer(logger klog.Logger, err error) {
	unanswered := ""
	if err == nil {
		c.setLastAnswer()
	} else {
		unanswered = cmp.Or(string(apierrors.ReasonForError(err)), "unanswered")
	}
	c.mu.Lock()
	before := c.unanswered
	c.unanswered = unanswered
	c.mu.Unlock()
	switch {
	case unanswered == before:
	case err != nil:
		logger.Error(err, "The scheduler's rights cannot be checked, trying again", "every", Retry)
	default:
		logger.Info("The scheduler's rights are checked again")
	}
}

func (c *Checker) setLastAnswer() { lastAnswer.Set(float64(c.clock.Now().Unix())) }

// ask returns the rights that are missing: first by one list of all rules that hold in every namespace, which is not
// complete where other authorizers than RBAC decide, and then, of those that are not in it, one by one.
func (c *Checker) ask(ctx context.Context) (missing []Right, more int, err error) {
	review := &authorizationv1.SelfSubjectRulesReview{Spec: authorizationv1.SelfSubjectRulesReviewSpec{Namespace: nowhere}}
	review, err = c.client.AuthorizationV1().SelfSubjectRulesReviews().Create(ctx, review, metav1.CreateOptions{})
	if err != nil {
		return nil, 0, fmt.Errorf("list the rules: %w", err)
	}
	var granted []rbacv1.PolicyRule
	for _, rule := range review.Status.ResourceRules {
		granted = append(granted, rbacv1.PolicyRule{
			Verbs: rule.Verbs, APIGroups: rule.APIGroups, Resources: rule.Resources, ResourceNames: rule.ResourceNames,
		})
	}
	for _, right := range c.required {
		if covered, _ := validation.Covers(granted, []rbacv1.PolicyRule{right.rule()}); covered {
			continue
		}
		if len(missing) == maxConfirmed {
			more++
			continue
		}
		allowed, err := c.allowed(ctx, right)
		if err != nil {
			return nil, 0, fmt.Errorf("ask for %s: %w", right, err)
		}
		if !allowed {
			missing = append(missing, right)
		}
	}
	return missing, more, nil
}

// nowhere is a namespace that cannot exist, so no RoleBinding is in it: the rules there are those of all namespaces.
const nowhere = "no.namespace"

func (r Right) rule() rbacv1.PolicyRule {
	rule := rbacv1.PolicyRule{Verbs: []string{r.Verb}, APIGroups: []string{r.Group}, Resources: []string{r.Resource}}
	if r.Name != "" {
		rule.ResourceNames = []string{r.Name}
	}
	return rule
}

func (c *Checker) allowed(ctx context.Context, right Right) (bool, error) {
	resource, sub, _ := strings.Cut(right.Resource, "/")
	review := &authorizationv1.SelfSubjectAccessReview{Spec: authorizationv1.SelfSubjectAccessReviewSpec{
		ResourceAttributes: &authorizationv1.ResourceAttributes{
			Verb: right.Verb, Group: right.Group, Resource: resource, Subresource: sub, Namespace: right.Namespace, Name: right.Name,
		},
	}}
	review, err := c.client.AuthorizationV1().SelfSubjectAccessReviews().Create(ctx, review, metav1.CreateOptions{})
	if err != nil {
		return false, err
	}
	status := review.Status
	if !status.Allowed && !status.Denied && status.EvaluationError != "" {
		return false, fmt.Errorf("an authorizer of the API server gave no answer: %s", status.EvaluationError)
	}
	return status.Allowed, nil
}

// whoAmI is the name of the user that the API server sees.
func (c *Checker) whoAmI(ctx context.Context) string {
	review, err := c.client.AuthenticationV1().SelfSubjectReviews().Create(ctx, &authenticationv1.SelfSubjectReview{}, metav1.CreateOptions{})
	if err != nil {
		return "unknown"
	}
	return review.Status.UserInfo.Username
}

// Missing are the missing rights in words, also those without which pods are scheduled.
func (c *Checker) Missing() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	var texts []string
	for _, right := range c.missing {
		texts = append(texts, right.String())
	}
	if c.more > 0 {
		texts = append(texts, fmt.Sprintf("and up to %d more", c.more))
	}
	return texts
}

// Problem says which rights are missing and what grants them, and which policies are void; it is empty if no right is missing without which
// pods wait, and no policy is void. It waits for the first look to end, which is bounded, and has an error if ctx ends before that.
func (c *Checker) Problem(ctx context.Context) (string, error) {
	select {
	case <-c.looked:
	case <-ctx.Done():
		return "", fmt.Errorf("wait for the first look at the scheduler's rights: %w", context.Cause(ctx))
	}
	texts := c.Missing()
	c.mu.Lock()
	defer c.mu.Unlock()
	var b strings.Builder
	if slices.ContainsFunc(c.missing, func(r Right) bool { return !r.optional() }) {
		fmt.Fprintf(&b, "The scheduler lacks rights in the cluster. It is user %q and may not:\n", c.user)
		for _, text := range texts {
			b.WriteString("  " + text + "\n")
		}
		b.WriteString("To grant them, apply:\n")
		var roles []string
		for _, right := range c.missing {
			if !slices.Contains(roles, right.Role) {
				roles = append(roles, right.Role)
				b.WriteString("  " + right.Role + "\n")
			}
		}
	}
	if len(c.void) > 0 {
		fmt.Fprintf(&b, "Admission policies are missing or not about the scheduler's account %q, which could write:\n", c.user)
		for _, text := range c.void {
			b.WriteString("  " + text + "\n")
		}
		b.WriteString("To forbid it, apply manifests/base/access; if the account has another name than there, change it in the policies, too.\n")
	}
	if b.Len() > 0 {
		fmt.Fprintf(&b, "Rights are looked at every %s until nothing is wrong.\n", Retry)
	}
	return b.String(), nil
}
