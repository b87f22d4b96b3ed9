// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package rights_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/rest"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/metrics"
	"k8s.io/component-base/metrics/legacyregistry"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/textlogger"
	"k8s.io/utils/clock"
	testingclock "k8s.io/utils/clock/testing"

	"stowage.dev/stowage/pkg/plugins/rights"
	"stowage.dev/stowage/pkg/policies"
)

// apiServer answers reviews.
type apiServer struct {
	*fake.Clientset
	mutex sync.Mutex // guards what follows, while reviews are answered
	// rules are in the list of rules; allowed are granted in some other way.
	rules   []authorizationv1.ResourceRule
	allowed map[string]bool
	err     error
	// write is the answer to the write of a claim.
	write error
	// failing is what an authorizer of the API server says of why it did not decide.
	failing string
	// lists and questions count what was asked.
	lists, questions int
}

func newAPIServer() *apiServer {
	s := &apiServer{Clientset: fake.NewSimpleClientset(), allowed: map[string]bool{}}
	s.PrependReactor("create", "*", func(action clienttesting.Action) (bool, runtime.Object, error) {
		s.mutex.Lock()
		defer s.mutex.Unlock()
		if s.err != nil {
			return true, nil, s.err
		}
		switch review := action.(clienttesting.CreateAction).GetObject().(type) {
		case *authorizationv1.SelfSubjectRulesReview:
			s.lists++
			return true, &authorizationv1.SelfSubjectRulesReview{Status: authorizationv1.SubjectRulesReviewStatus{ResourceRules: s.rules, Incomplete: true}}, nil
		case *authorizationv1.SelfSubjectAccessReview:
			s.questions++
			at := review.Spec.ResourceAttributes
			key := fmt.Sprintf("%s %s/%s/%s %s %s", at.Verb, at.Group, at.Resource, at.Subresource, at.Namespace, at.Name)
			return true, &authorizationv1.SelfSubjectAccessReview{Status: authorizationv1.SubjectAccessReviewStatus{
				Allowed: s.allowed[key], EvaluationError: s.failing,
			}}, nil
		case *resourceapi.ResourceClaim:
			return true, review, s.write
		case *authenticationv1.SelfSubjectReview:
			return true, &authenticationv1.SelfSubjectReview{Status: authenticationv1.SelfSubjectReviewStatus{
				UserInfo: authenticationv1.UserInfo{Username: "system:serviceaccount:a:b"},
			}}, nil
		}
		return false, nil, nil
	})
	return s
}

// grant replaces the rules, also while a checker runs.
func (s *apiServer) grant(list ...rights.Right) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	s.rules = granting(list...)
}

// listed is how often the list of rules was asked for.
func (s *apiServer) listed() int {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	return s.lists
}

var (
	listSlices   = rights.Right{Verb: "list", Group: "resource.k8s.io", Resource: "resourceslices", Role: "ClusterRole one: kubectl apply -k one"}
	updateStatus = rights.Right{Verb: "update", Group: "resource.k8s.io", Resource: "resourceclaims/status", Role: "ClusterRole one: kubectl apply -k one"}
	getLease     = rights.Right{Verb: "get", Group: "coordination.k8s.io", Resource: "leases", Namespace: "n", Name: "l", Role: "Role two: kubectl apply -k two"}
	bindPods     = rights.Right{Verb: "create", Resource: "pods/binding", Role: "ClusterRole one: kubectl apply -k one"}
	all          = []rights.Right{listSlices, updateStatus, getLease, bindPods}
)

// problem returns what the checker says. It waits for the first look.
func problem(t *testing.T, checker *rights.Checker) string {
	t.Helper()
	text, err := checker.Problem(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return text
}

func granting(list ...rights.Right) []authorizationv1.ResourceRule {
	var rules []authorizationv1.ResourceRule
	for _, r := range list {
		rules = append(rules, authorizationv1.ResourceRule{Verbs: []string{r.Verb}, APIGroups: []string{r.Group}, Resources: []string{r.Resource}})
	}
	return rules
}

func TestTheProblemNamesWhatIsMissing(t *testing.T) {
	everything := []authorizationv1.ResourceRule{{Verbs: []string{"*"}, APIGroups: []string{"*"}, Resources: []string{"*"}}}
	tests := map[string]struct {
		rules         []authorizationv1.ResourceRule
		allowed       map[string]bool
		want          string
		wantQuestions int
	}{
		"nothing is missing for an administrator": {rules: everything},
		"nothing is missing of what rules grant":  {rules: granting(all...)},
		"what rules do not grant is asked for, and may be granted nevertheless": {
			rules:         granting(listSlices, updateStatus, bindPods),
			allowed:       map[string]bool{"get coordination.k8s.io/leases/ n l": true},
			wantQuestions: 1,
		},
		"rights are named as kubectl takes them, with who lacks them and what grants them": {
			rules: granting(listSlices),
			want: `The scheduler lacks rights in the cluster. It is user "system:serviceaccount:a:b" and may not:
  update resourceclaims.resource.k8s.io/status in all namespaces
  get leases.coordination.k8s.io l in namespace n
  create pods/binding in all namespaces
To grant them, apply:
  ClusterRole one: kubectl apply -k one
  Role two: kubectl apply -k two
Rights are looked at every 10s until nothing is wrong.
`,
			wantQuestions: 3,
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			server := newAPIServer()
			server.rules, server.allowed = tc.rules, tc.allowed
			checker := rights.NewChecker(server, all, nil, clock.RealClock{}, nil)
			if again := checker.Look(t.Context()); again != (tc.want != "") {
				t.Errorf("look again soon: %v", again)
			}
			if diff := cmp.Diff(tc.want, problem(t, checker)); diff != "" {
				t.Errorf("problem (-want +got):\n%s", diff)
			}
			if server.lists != 1 || server.questions != tc.wantQuestions {
				t.Errorf("%d lists and %d questions, want 1 and %d", server.lists, server.questions, tc.wantQuestions)
			}
		})
	}
}

func TestAskingIsBounded(t *testing.T) {
	server := newAPIServer()
	var many []rights.Right
	for i := range 100 {
		many = append(many, rights.Right{Verb: "get", Resource: fmt.Sprintf("r%d", i), Role: "x"})
	}
	checker := rights.NewChecker(server, many, nil, clock.RealClock{}, nil)
	checker.Look(t.Context())
	if server.questions != 20 {
		t.Errorf("%d questions, want 20", server.questions)
	}
	want := "  get r19 in all namespaces\n  and up to 80 more\n"
	if got := problem(t, checker); !strings.Contains(got, want) {
		t.Errorf("problem lacks %q:\n%s", want, got)
	}
}

// Who asks before the first look waits for it: at a start nothing fails, and nothing is logged.
func TestWhoAsksAtAStartWaitsForTheFirstLook(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := newAPIServer()
		checker := rights.NewChecker(server, all, nil, clock.RealClock{}, nil)
		answers := make(chan string)
		for range 2 {
			go func() {
				text, err := checker.Problem(t.Context())
				answers <- fmt.Sprintln(text, err)
			}()
		}
		synctest.Wait()
		select {
		case text := <-answers:
			t.Fatalf("answered %q before the first look", text)
		default:
		}
		checker.Look(t.Context())
		for range 2 {
			if text := <-answers; !strings.Contains(text, "lacks rights") {
				t.Errorf("after the first look %q", text)
			}
		}
	})
}

// No answer is no missing right, and does not make one that was missing go away.
func TestWithoutAnAnswerNothingChanges(t *testing.T) {
	server := newAPIServer()
	server.err = errors.New("down")
	checker := rights.NewChecker(server, all, nil, clock.RealClock{}, nil)
	left, leave := context.WithCancel(t.Context())
	leave()
	if got, err := checker.Problem(left); got != "" || !errors.Is(err, context.Canceled) {
		t.Errorf("before the first look %q, %v, want an error", got, err)
	}
	if !checker.Look(t.Context()) || problem(t, checker) != "" {
		t.Errorf("without an answer: %q", problem(t, checker))
	}
	server.err = nil
	checker.Look(t.Context())
	before := problem(t, checker)
	server.err = errors.New("down")
	if checker.Look(t.Context()); before == "" || problem(t, checker) != before {
		t.Errorf("problem %q, before %q", problem(t, checker), before)
	}
}

// Without an answer nothing is known to be wrong, so the log says it once for each reason, and the metric stands still.
func TestWithoutAnAnswerTheLogAndTheMetricSaySo(t *testing.T) {
	server := newAPIServer()
	server.grant(all...)
	hour := testingclock.NewFakeClock(time.Unix(1_000_000, 0))
	checker := rights.NewChecker(server, all, policies.OfScheduler(), hour, nil)
	refused := refusal("stowage-scheduler-own-claims")
	down := apierrors.NewTooManyRequestsError("wait")
	const fails, works = `"The scheduler's rights cannot be checked, trying again" err=`, `"The scheduler's rights are checked again"`
	answered := int64(0)
	for _, step := range []struct {
		name       string
		err, write error
		want       string
	}{
		{name: "all is well"},
		{name: "down", err: errors.New("connection refused, port 1"), want: fails},
		{name: "still down", err: errors.New("connection refused, port 2")},
		{name: "down for another reason", err: down, want: fails},
		{name: "again so", err: down},
		{name: "an answer", want: works},
		{name: "another one"},
		{name: "no answer about the policies", write: down, want: fails},
		{name: "none again", write: down},
		{name: "an answer about both", want: works},
	} {
		hour.Step(time.Minute)
		var log bytes.Buffer
		logger := textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(&log)))
		server.err, server.write = step.err, refused
		if step.write != nil {
			server.write = step.write
		}
		checker.Look(klog.NewContext(t.Context(), logger))
		if step.err == nil && step.write == nil {
			answered = hour.Now().Unix()
		}
		if got := lastAnswer(t); got != answered {
			t.Errorf("%s: the last answer was at %d, want %d", step.name, got, answered)
		}
		var lines []string
		for line := range strings.Lines(log.String()) {
			if strings.Contains(line, "checked") {
				lines = append(lines, line)
			}
		}
		if len(lines) != min(len(step.want), 1) || !strings.Contains(strings.Join(lines, ""), step.want) {
			t.Errorf("%s: the log has %q, want %q once", step.name, lines, step.want)
		}
	}
}

// A check that never has an answer says since when.
func TestTheMetricBeginsWithTheCheck(t *testing.T) {
	server := newAPIServer()
	server.err = errors.New("down")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	rights.NewChecker(server, all, nil, testingclock.NewFakeClock(time.Unix(2_000_000, 0)), nil).Run(ctx)
	if got := lastAnswer(t); got != 2_000_000 {
		t.Errorf("the last answer was at %d, want the check's start", got)
	}
}

// lastAnswer is the metric as Prometheus reads it.
func lastAnswer(t *testing.T) int64 {
	t.Helper()
	families, err := legacyregistry.DefaultGatherer.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, family := range families {
		if family.GetName() == "stowage_scheduler_rights_last_answer_timestamp_seconds" {
			return int64(family.GetMetric()[0].GetGauge().GetValue())
		}
	}
	t.Fatal("there is no such metric")
	return 0
}

// An authorizer that does not answer has not denied anything.
func TestAnAuthorizerWithoutAnAnswerIsNoMissingRight(t *testing.T) {
	server := newAPIServer()
	server.failing = "webhook: timeout"
	checker := rights.NewChecker(server, all, nil, clock.RealClock{}, nil)
	if !checker.Look(t.Context()) || problem(t, checker) != "" {
		t.Errorf("problem %q", problem(t, checker))
	}
	server.failing = ""
	if checker.Look(t.Context()); problem(t, checker) == "" {
		t.Error("no problem when the authorizer answers")
	}
}

// Events are not what pods wait for.
func TestWithoutEventsTheSchedulerIsReady(t *testing.T) {
	server := newAPIServer()
	events := rights.Right{Verb: "create", Group: "events.k8s.io", Resource: "events", Role: "ClusterRole one: kubectl apply -k one"}
	server.grant(all...)
	checker := rights.NewChecker(server, append([]rights.Right{events}, all...), nil, clock.RealClock{}, nil)
	if again := checker.Look(t.Context()); again || problem(t, checker) != "" {
		t.Errorf("look again soon: %v, problem %q", again, problem(t, checker))
	}
	server.grant(updateStatus, getLease, bindPods)
	checker.Look(t.Context())
	for _, want := range []string{"create events.events.k8s.io", "list resourceslices.resource.k8s.io"} {
		if !strings.Contains(problem(t, checker), want) {
			t.Errorf("problem lacks %q:\n%s", want, problem(t, checker))
		}
	}
}

// A grant shows within seconds, and who has all rights asks seldom.
func TestAGrantShowsAndThenLittleIsAsked(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := newAPIServer()
		ctx, cancel := context.WithCancel(t.Context())
		checker := rights.NewChecker(server, all, nil, clock.RealClock{}, nil)
		done := make(chan struct{})
		go func() {
			defer close(done)
			checker.Run(ctx)
		}()
		synctest.Wait()
		if problem(t, checker) == "" {
			t.Error("no problem without rights")
		}
		server.grant(all...)
		time.Sleep(rights.Retry)
		synctest.Wait()
		if problem := problem(t, checker); problem != "" || server.listed() != 2 {
			t.Errorf("%d lists, problem %q", server.listed(), problem)
		}
		time.Sleep(time.Hour)
		synctest.Wait()
		if got, want := server.listed(), 2+12; got != want {
			t.Errorf("%d lists in an hour, want %d", got, want)
		}
		cancel()
		<-done
	})
}

// results are what is said of calls besides.
type results []string

func (r *results) Increment(_ context.Context, code, method, host string) {
	*r = append(*r, code+" "+method+" "+host)
}

// A right that is taken away shows when a call is refused for that, and not only at the next look.
func TestARefusedCallIsLookedInto(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := newAPIServer()
		server.grant(all...)
		ctx, cancel := context.WithCancel(t.Context())
		denied, besides := rights.NewDenials(), &results{}
		calls := denied.Observe(besides)
		checker := rights.NewChecker(server, all, nil, clock.RealClock{}, denied)
		done := make(chan struct{})
		go func() {
			defer close(done)
			checker.Run(ctx)
		}()
		step := func(pause time.Duration, code string, wantLists int, wantProblem bool) {
			t.Helper()
			time.Sleep(pause)
			calls.Increment(ctx, code, "PUT", "api")
			calls.Increment(ctx, code, "GET", "api")
			synctest.Wait()
			if has := problem(t, checker) != ""; server.listed() != wantLists || has != wantProblem {
				t.Errorf("after %s and %s: %d lists, a problem: %t, want %d, %t", pause, code, server.listed(), has, wantLists, wantProblem)
			}
		}
		step(time.Minute, "409", 1, false)
		server.grant(listSlices, updateStatus)
		step(0, "500", 1, false)
		step(0, "403", 2, true)
		server.grant(all...)
		step(rights.Retry, "200", 3, false)
		server.grant(listSlices)
		step(rights.Retry, "422", 4, true) // the answer to an allocation, without a right to resourceclaims/binding
		server.grant(all...)
		step(rights.Retry, "200", 5, false)
		// Calls that are refused for another reason, again and again, do not make it look more often.
		for range 9 {
			step(rights.Retry/10, "403", server.listed(), false)
		}
		step(rights.Retry/10, "403", 6, false)
		if want := []string{"409 PUT api", "409 GET api", "500 PUT api"}; !slices.Equal((*besides)[:3], want) {
			t.Errorf("told besides: %v, want first %v", *besides, want)
		}
		cancel()
		<-done
	})
}

// refusal is what the API server says when a policy denies a claim.
func refusal(policy string) *apierrors.StatusError {
	return apierrors.NewForbidden(schema.GroupResource{Group: "resource.k8s.io", Resource: "resourceclaims"}, "forbidden.stowage.dev",
		fmt.Errorf("ValidatingAdmissionPolicy '%s' with binding '%s' denied request: no", policy, policy))
}

// A scheduler whose policy is not about its account is not ready. Only a refusal that names the policy is one, and what is not known changes nothing.
func TestAVoidPolicyIsAProblem(t *testing.T) {
	const said = `Admission policies are missing or not about the scheduler's account "system:serviceaccount:a:b", which could write:
  claims of users (policy stowage-scheduler-own-claims)
To forbid it, apply manifests/base/access; if the account has another name than there, change it in the policies, too.
Rights are looked at every 10s until nothing is wrong.
`
	server := newAPIServer()
	server.grant(all...)
	checker := rights.NewChecker(server, all, policies.OfScheduler(), clock.RealClock{}, nil)
	for _, step := range []struct {
		name    string
		write   error
		problem string
		again   bool
	}{
		{name: "another policy refuses from the start", write: refusal("quiet"), again: true},
		{name: "it would pass", problem: said, again: true},
		{name: "another policy refuses what would pass", write: refusal("quiet"), problem: said, again: true},
		{name: "nobody answers", write: errors.New("away"), problem: said, again: true},
		{name: "its policy refuses", write: refusal("stowage-scheduler-own-claims")},
		{name: "nobody answers after the refusal", write: errors.New("away"), again: true},
	} {
		server.write = step.write
		if again := checker.Look(t.Context()); again != step.again {
			t.Errorf("%s: look again soon: %t", step.name, again)
		}
		if diff := cmp.Diff(step.problem, problem(t, checker)); diff != "" {
			t.Errorf("%s: problem (-want +got):\n%s", step.name, diff)
		}
	}
	server.write = nil
	server.grant(updateStatus, getLease, bindPods)
	checker.Look(t.Context())
	for _, want := range []string{"  list resourceslices.resource.k8s.io in all namespaces\n", "  claims of users ("} {
		if !strings.Contains(problem(t, checker), want) {
			t.Errorf("problem lacks %q:\n%s", want, problem(t, checker))
		}
	}
}

// wire answers requests as an API server does in which the policy holds.
type wire struct{ writes int }

func (w *wire) RoundTrip(request *http.Request) (*http.Response, error) {
	answer := httptest.NewRecorder()
	answer.Header().Set("Content-Type", "application/json")
	var body any = &authorizationv1.SelfSubjectRulesReview{
		TypeMeta: metav1.TypeMeta{APIVersion: "authorization.k8s.io/v1", Kind: "SelfSubjectRulesReview"},
		Status:   authorizationv1.SubjectRulesReviewStatus{ResourceRules: granting(all...)},
	}
	if strings.HasSuffix(request.URL.Path, "/resourceclaims") {
		w.writes++
		status := refusal("stowage-scheduler-own-claims").ErrStatus
		status.APIVersion, status.Kind = "v1", "Status"
		body = &status
		answer.WriteHeader(int(status.Code))
	}
	err := json.NewEncoder(answer).Encode(body)
	return answer.Result(), err
}

// The refusal that is wanted is no refused call that is looked into: the next look would be after 10 s, for ever.
func TestAPolicyThatHoldsIsTriedSeldom(t *testing.T) {
	before := metrics.RequestResult
	defer func() { metrics.RequestResult = before }()
	synctest.Test(t, func(t *testing.T) {
		denied := rights.NewDenials()
		metrics.RequestResult = denied.Observe(&results{})
		api := &wire{}
		client, err := kubernetes.NewForConfig(&rest.Config{Host: "http://api", Transport: api})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour-time.Second) // a look is due at the full hour
		defer cancel()
		checker := rights.NewChecker(client, all, policies.OfScheduler(), clock.RealClock{}, denied)
		checker.Run(ctx)
		if problem := problem(t, checker); problem != "" || api.writes != 12 {
			t.Errorf("%d writes in an hour, want 12; problem %q", api.writes, problem)
		}
	})
}

func TestNothingIsAskedWhereNothingIsRequired(t *testing.T) {
	server := newAPIServer()
	checker := rights.NewChecker(server, nil, nil, clock.RealClock{}, nil)
	checker.Run(t.Context()) // returns
	if problem(t, checker) != "" || server.lists != 0 {
		t.Errorf("%d lists, problem %q", server.lists, problem(t, checker))
	}
}
