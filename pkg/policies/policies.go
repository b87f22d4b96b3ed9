// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package policies finds out whether the admission policies about the node agent and the scheduler
// are about the accounts that these run as.
package policies

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"
)

const (
	// grace is for a policy that has just been made to come into effect.
	grace = 30 * time.Second
	// period is between two looks. While nothing is known it doubles, up to longest.
	period  = time.Second
	longest = time.Minute
	// timeout is for the writes of a look, which are made at the same time.
	timeout = 5 * time.Second
)

// forbidden is the name of what neither may write.
const forbidden = "forbidden.stowage.dev"

// Write is what an admission policy forbids. A policy names the account that it is for: where we run as another account, what it forbids is
// allowed, and nothing says so. So that is tried, as a dry run.
type Write struct {
	// Policy is its name, and What is what it forbids.
	Policy, What string
	try          func(ctx context.Context, client kubernetes.Interface, dryRun []string) error
}

// OfNodeAgent has a write for each policy that is about the node agent's account. The agent runs on the node.
func OfNodeAgent(node string) []Write {
	return []Write{
		{
			"stowage-node-agent-own-slices", "ResourceSlices of other nodes and drivers",
			func(ctx context.Context, client kubernetes.Interface, dryRun []string) error {
				_, err := client.ResourceV1().ResourceSlices().Create(ctx, &resourceapi.ResourceSlice{
					ObjectMeta: metav1.ObjectMeta{GenerateName: forbidden + "-"},
					Spec: resourceapi.ResourceSliceSpec{
						Driver: forbidden, NodeName: ptr.To(forbidden), Pool: resourceapi.ResourcePool{Name: forbidden, ResourceSliceCount: 1},
					},
				}, metav1.CreateOptions{DryRun: dryRun})
				return err
			},
		},
		{"stowage-node-agent-own-node", "any condition of nodes", func(ctx context.Context, client kubernetes.Interface, dryRun []string) error {
			patch := `{"status":{"conditions":[{"type":"` + forbidden + `","status":"True"}]}}`
			_, err := client.CoreV1().Nodes().Patch(ctx, node, types.StrategicMergePatchType, []byte(patch),
				metav1.PatchOptions{DryRun: dryRun}, "status")
			return err
		}},
		{
			"stowage-node-agent-own-events", "events in the name of others",
			func(ctx context.Context, client kubernetes.Interface, dryRun []string) error {
				_, err := client.CoreV1().Events(metav1.NamespaceDefault).Create(ctx, &corev1.Event{
					ObjectMeta:     metav1.ObjectMeta{GenerateName: forbidden + "-"},
					InvolvedObject: corev1.ObjectReference{APIVersion: "v1", Kind: "Pod", Namespace: metav1.NamespaceDefault, Name: forbidden},
					Source:         corev1.EventSource{Component: forbidden}, Reason: "Forbidden", Type: corev1.EventTypeNormal,
				}, metav1.CreateOptions{DryRun: dryRun})
				return err
			},
		},
	}
}

// OfScheduler has a write for the policy that is about the scheduler's account.
func OfScheduler() []Write {
	return []Write{
		{"stowage-scheduler-own-claims", "claims of users", func(ctx context.Context, client kubernetes.Interface, dryRun []string) error {
			_, err := client.ResourceV1().ResourceClaims(metav1.NamespaceDefault).Create(ctx, &resourceapi.ResourceClaim{
				ObjectMeta: metav1.ObjectMeta{GenerateName: forbidden + "-"},
			}, metav1.CreateOptions{DryRun: dryRun})
			return err
		}},
	}
}

// VoidError says that the agent could write what it must not.
type VoidError struct {
	account  string
	policies []string // and what they forbid
}

func (e *VoidError) Error() string {
	return fmt.Sprintf("admission policies are missing or not about the agent's account %s, which could write: %s. Apply "+
		"manifests/base/access; "+
		"if the account has another name than there, change it in the policies, too", e.account, strings.Join(e.policies, "; "))
}

// Await returns nil when the policies refuse what they forbid, or when ctx ends, and an error if some do not for as long as grace. It calls
// undecided whenever that cannot be found out, and goes on asking.
func Await(ctx context.Context, client kubernetes.Interface, writes []Write, undecided func()) error {
	logger := klog.FromContext(ctx)
	pause := period
	var since time.Time // from when on each look has found void policies
	var said string
	say := func(message string, err error) {
		if message != said {
			logger.Info(message, "reason", err)
			said = message
		}
	}
	for {
		void, unknown := Void(ctx, client, writes)
		switch {
		case len(void) == 0 && unknown == nil:
			return nil
		case len(void) == 0:
			say("It is not known yet whether the admission policies are in effect", unknown)
			since = time.Time{}
			undecided()
		case since.IsZero():
			since, pause = time.Now(), period
		case time.Since(since) >= grace:
			return &VoidError{account: accountOf(ctx, client), policies: void}
		default:
			say("Waiting for admission policies to come into effect", fmt.Errorf("void: %s", strings.Join(void, "; ")))
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(pause):
		}
		if since.IsZero() {
			pause = min(2*pause, longest)
		}
	}
}

// Void are what the policies forbid and would pass, with their names. unknown is why it is not known of others.
func Void(ctx context.Context, client kubernetes.Interface, writes []Write) (void []string, unknown error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	errs := make([]error, len(writes))
	var group sync.WaitGroup
	for i, write := range writes {
		group.Go(func() { errs[i] = write.try(ctx, client, []string{metav1.DryRunAll}) })
	}
	group.Wait()
	for i, write := range writes {
		switch err := errs[i]; {
		case err == nil:
			void = append(void, write.What+" (policy "+write.Policy+")")
		case !refusedBy(write.Policy, err):
			unknown = errors.Join(unknown, fmt.Errorf("policy %s: %w", write.Policy, err))
		}
	}
	return void, unknown
}

// refusedBy tells a policy's refusal from others: RBAC refuses before any policy is asked. The API server names the policy in the message
// alone (k8s.io/apiserver, pkg/admission/plugin/policy/validating).
func refusedBy(policy string, err error) bool {
	return apierrors.IsForbidden(err) && strings.Contains(err.Error(), "ValidatingAdmissionPolicy '"+policy+"'")
}

// accountOf is who the API server takes the agent for.
func accountOf(ctx context.Context, client kubernetes.Interface) string {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	review, err := client.AuthenticationV1().SelfSubjectReviews().Create(ctx, &authenticationv1.SelfSubjectReview{}, metav1.CreateOptions{})
	if err != nil {
		return fmt.Sprintf("(unknown: %v)", err)
	}
	return fmt.Sprintf("%q", review.Status.UserInfo.Username)
}
