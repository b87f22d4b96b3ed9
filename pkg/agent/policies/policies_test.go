package policies

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
)

// The agent runs where the API server refuses what the policies forbid, waits for policies that have just been made, and serves the kubelet
// while the API server does not answer.
func TestTheAgentRunsOnlyUnderItsPolicies(t *testing.T) {
	no := apierrors.NewForbidden(schema.GroupResource{}, "", errors.New("policy"))
	away := errors.New("away")
	// Each case says what the API server answers at a time to a write of a resource.
	for name, tc := range map[string]struct {
		answer    func(at time.Duration, resource string) error
		undecided bool
		void      []string // in the error; none if the agent runs
	}{
		"all refused": {answer: func(time.Duration, string) error { return no }},
		"policies come into effect": {answer: func(at time.Duration, _ string) error {
			if at < grace-2*period {
				return nil
			}
			return no
		}},
		"no policy of slices": {answer: func(_ time.Duration, resource string) error {
			if resource == "resourceslices" {
				return nil
			}
			return no
		}, void: []string{"stowage-node-agent-own-slices"}},
		"no policy of events, and nothing is known of others": {answer: func(_ time.Duration, resource string) error {
			if resource == "events" {
				return nil
			}
			return away
		}, void: []string{"stowage-node-agent-own-events"}},
		"none": {
			answer: func(time.Duration, string) error { return nil },
			void:   []string{"stowage-node-agent-own-slices", "stowage-node-agent-own-node", "stowage-node-agent-own-events"},
		},
		"the API server comes back, with policies": {answer: func(at time.Duration, _ string) error {
			if at < time.Hour {
				return away
			}
			return no
		}, undecided: true},
		"the API server comes back, without": {answer: func(at time.Duration, _ string) error {
			if at < time.Hour {
				return away
			}
			return nil
		}, undecided: true, void: []string{"stowage-node-agent-own-slices", "stowage-node-agent-own-node", "stowage-node-agent-own-events"}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				begin := time.Now()
				client := fake.NewClientset()
				client.PrependReactor("*", "*", func(action clienttesting.Action) (bool, runtime.Object, error) {
					resource := action.GetResource().Resource
					if resource == "selfsubjectreviews" {
						return true, &authenticationv1.SelfSubjectReview{Status: authenticationv1.SelfSubjectReviewStatus{UserInfo: authenticationv1.UserInfo{Username: "system:serviceaccount:other:agent"}}}, nil
					}
					return true, nil, tc.answer(time.Since(begin), resource)
				})
				undecided := false
				err := Await(t.Context(), client, "node-1", func() { undecided = true })
				if undecided != tc.undecided {
					t.Errorf("undecided: %t", undecided)
				}
				var void *VoidError
				if got := errors.As(err, &void); got != (len(tc.void) > 0) {
					t.Fatalf("got %v", err)
				} else if !got {
					return
				}
				if !strings.Contains(err.Error(), `"system:serviceaccount:other:agent"`) || len(void.policies) != len(tc.void) {
					t.Errorf("message: %v", err)
				}
				for _, policy := range tc.void {
					if !strings.Contains(err.Error(), policy) {
						t.Errorf("%q is not about %s", err, policy)
					}
				}
			})
		})
	}
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), grace/2)
		defer cancel()
		if err := Await(ctx, fake.NewClientset(), "node-1", func() {}); err != nil {
			t.Errorf("asked to stop while it waits: %v", err)
		}
	})
}
