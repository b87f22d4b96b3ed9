// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/google/go-cmp/cmp"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	genericapifilters "k8s.io/apiserver/pkg/endpoints/filters"
	apirequest "k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/client-go/kubernetes"
	clientscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/metrics"
)

// policy allows everybody the paths that kube-scheduler always allows, and an operator those below /readyz.
type policy struct {
	authorizer.Authorizer
	// questions are the paths that it was asked about.
	questions *[]string
}

func (p policy) Authorize(_ context.Context, request authorizer.Attributes) (authorizer.Decision, string, error) {
	path, name := request.GetPath(), request.GetUser().GetName()
	*p.questions = append(*p.questions, path)
	switch {
	case path == "/readyz" || path == "/livez" || path == "/healthz":
		return authorizer.DecisionAllow, "", nil
	case name == "broken":
		return authorizer.DecisionNoOpinion, "", errors.New("no answer")
	case path == "/readyz/rights" && name == "operator":
		return authorizer.DecisionAllow, "", nil
	}
	return authorizer.DecisionNoOpinion, "", nil
}

// A missing right fails /readyz, and only who may see the check itself learns which right it is.
func TestReadinessWithholdsTheReasonFromStrangers(t *testing.T) {
	const problem = "The scheduler lacks rights in the cluster."
	const withheld = "Internal Server Error: \"/readyz\": [-]rights failed: reason withheld\n"
	named := func(name string) user.Info {
		return &user.DefaultInfo{Name: name, Groups: []string{user.AllAuthenticated}}
	}
	anonymous := &user.DefaultInfo{Name: user.Anonymous, Groups: []string{user.AllUnauthenticated}}
	tests := map[string]struct {
		path, problem string
		caller        user.Info
		left          bool // the caller, before the first look has ended
		wantStatus    int
		wantBody      string
		wantQuestions []string
	}{
		"without a problem the next page answers": {
			path: "/readyz", caller: anonymous, wantStatus: http.StatusOK, wantBody: "next", wantQuestions: []string{"/readyz"},
		},
		"an anonymous caller gets no reason, and nobody is asked about it": {
			path: "/readyz", problem: problem, caller: anonymous,
			wantStatus: http.StatusInternalServerError, wantBody: withheld, wantQuestions: []string{"/readyz"},
		},
		"a stranger with a name gets no reason": {
			path: "/readyz", problem: problem, caller: named("stranger"),
			wantStatus: http.StatusInternalServerError, wantBody: withheld, wantQuestions: []string{"/readyz", "/readyz/rights"},
		},
		"no answer about the caller is no right to know": {
			path: "/readyz", problem: problem, caller: named("broken"),
			wantStatus: http.StatusInternalServerError, wantBody: withheld, wantQuestions: []string{"/readyz", "/readyz/rights"},
		},
		"who may see the check gets the reason": {
			path: "/readyz", problem: problem, caller: named("operator"), wantStatus: http.StatusInternalServerError,
			wantBody:      "Internal Server Error: \"/readyz\": [-]rights failed: " + problem + "\n",
			wantQuestions: []string{"/readyz", "/readyz/rights"},
		},
		"a caller that has left is refused, which is not logged as an error is": {
			path: "/readyz", caller: named("operator"), left: true, wantStatus: http.StatusForbidden, wantQuestions: []string{"/readyz"},
			wantBody: `{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure","message":"forbidden: User \"operator\" ` +
				`cannot get path \"/readyz\": context canceled","reason":"Forbidden","details":{},"code":403}` + "\n",
		},
		"a missing right is no matter of life": {
			path: "/livez", problem: problem, caller: anonymous, wantStatus: http.StatusOK, wantBody: "next", wantQuestions: []string{"/livez"},
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			var questions []string
			gate := readiness{policy{questions: &questions}, func(ctx context.Context) (string, error) { return tc.problem, ctx.Err() }}
			var handler http.Handler = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("next")) })
			handler = genericapifilters.WithAuthorization(handler, gate, clientscheme.Codecs)
			handler = genericapifilters.WithRequestInfo(handler, &apirequest.RequestInfoFactory{})
			ctx, leave := context.WithCancel(t.Context())
			defer leave()
			if tc.left {
				leave()
			}
			request := httptest.NewRequest(http.MethodGet, tc.path, nil).WithContext(ctx)
			answer := httptest.NewRecorder()
			handler.ServeHTTP(answer, request.WithContext(apirequest.WithUser(request.Context(), tc.caller)))
			if answer.Code != tc.wantStatus || answer.Body.String() != tc.wantBody {
				t.Errorf("status %d, body %q, want %d, %q", answer.Code, answer.Body.String(), tc.wantStatus, tc.wantBody)
			}
			if diff := cmp.Diff(tc.wantQuestions, questions); diff != "" {
				t.Errorf("paths asked about (-want +got):\n%s", diff)
			}
			decision, _, err := gate.Authorize(ctx, authorizer.AttributesRecord{User: tc.caller, Path: tc.path})
			aware := gate.ConditionsAwareAuthorize(ctx, authorizer.AttributesRecord{User: tc.caller, Path: tc.path})
			if aware.IsAllow() != (decision == authorizer.DecisionAllow && err == nil) {
				t.Errorf("with conditions: %v, without: %v %v", aware, decision, err)
			}
		})
	}
}

// Whatever client is refused, it is noted.
func TestRefusedCallsAreNoted(t *testing.T) {
	before := metrics.RequestResult
	t.Cleanup(func() { metrics.RequestResult = before })
	denied := noteDenials()
	for _, status := range []int{http.StatusOK, http.StatusNotFound, http.StatusForbidden, http.StatusForbidden} {
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(status) }))
		client, err := kubernetes.NewForConfig(&rest.Config{Host: server.URL})
		if err != nil {
			t.Fatal(err)
		}
		_, err = client.CoreV1().Pods("n").Get(t.Context(), "p", metav1.GetOptions{})
		server.Close()
		select {
		case <-denied:
			if !apierrors.IsForbidden(err) {
				t.Errorf("noted for status %d", status)
			}
		default:
			if apierrors.IsForbidden(err) {
				t.Errorf("not noted for status %d", status)
			}
		}
		if (status == http.StatusForbidden) != apierrors.IsForbidden(err) {
			t.Errorf("status %d: %v", status, err)
		}
	}
}
