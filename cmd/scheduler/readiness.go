// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"slices"

	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/metrics"
	"k8s.io/component-base/metrics/prometheus/slis"
	schedulerserverconfig "k8s.io/kubernetes/cmd/kube-scheduler/app/config"
	"k8s.io/kubernetes/pkg/scheduler"
	"k8s.io/utils/clock"

	"stowage.dev/stowage/pkg/plugins/rights"
	"stowage.dev/stowage/pkg/policies"
)

// rightsCheck is the name of the check of rights, in answers and in the metric kubernetes_healthcheck.
const rightsCheck = "rights"

// noteDenials notes the calls of all clients that are refused from now on. It must be called before there are clients: what they tell of
// their calls is one variable for all.
func noteDenials() rights.Denials {
	denied := rights.NewDenials()
	metrics.RequestResult = denied.Observe(metrics.RequestResult)
	return denied
}

// checkRights has a checker look at the scheduler's rights until ctx ends, and /readyz fail while it lacks one that it
// needs, or has one that an admission policy should take from it. The checker asks few questions a
// second, whatever the scheduler itself may do.
func checkRights(ctx context.Context, config *schedulerserverconfig.CompletedConfig, sched *scheduler.Scheduler,
	denied rights.Denials,
) error {
	slow := rest.CopyConfig(config.KubeConfig)
	slow.QPS, slow.Burst = 5, 10
	client, err := kubernetes.NewForConfig(rest.AddUserAgent(slow, rightsCheck))
	if err != nil {
		return fmt.Errorf("make a client for the check of rights: %w", err)
	}
	checker := rights.NewChecker(client, rights.Required(&config.ComponentConfig, sched.Profiles), policies.OfScheduler(),
		clock.RealClock{}, denied)
	go checker.Run(ctx)
	if config.Authorization.Authorizer != nil { // nil without a secure port
		config.Authorization.Authorizer = readiness{config.Authorization.Authorizer, checker.Problem}
	}
	return nil
}

// readiness is the authorizer of kube-scheduler's server, and has /readyz fail while there is a problem. That server takes
// no further checks. An authorizer that fails makes it answer with status 500, as a check that fails does.
type readiness struct {
	authorizer.Authorizer
	problem func(context.Context) (string, error)
}

func (r readiness) Authorize(ctx context.Context, request authorizer.Attributes) (authorizer.Decision, string, error) {
	decision, reason, err := r.Authorizer.Authorize(ctx, request)
	if decision != authorizer.DecisionAllow || request.GetPath() != "/readyz" {
		return decision, reason, err
	}
	problem, waitErr := r.problem(ctx)
	if waitErr != nil {
		return authorizer.DecisionDeny, waitErr.Error(), nil // the caller has left: nobody reads an answer, and an error would be logged
	}
	if problem == "" {
		slis.ObserveHealthcheck(ctx, rightsCheck, "readyz", slis.Success)
		return decision, reason, err
	}
	slis.ObserveHealthcheck(ctx, rightsCheck, "readyz", slis.Error)
	if !r.mayKnow(ctx, request.GetUser()) {
		problem = "reason withheld"
	}
	return authorizer.DecisionDeny, "", fmt.Errorf("[-]%s failed: %s", rightsCheck, problem)
}

func (r readiness) ConditionsAwareAuthorize(ctx context.Context, request authorizer.Attributes) authorizer.ConditionsAwareDecision {
	return authorizer.ConditionsAwareDecisionFromParts(r.Authorize(ctx, request))
}

// mayKnow tells whether a caller may see the check itself. Everybody may see /readyz, and nobody learns the reason by
// that, as with kube-scheduler's own checks. About callers without a name nobody is asked.
func (r readiness) mayKnow(ctx context.Context, caller user.Info) bool {
	if caller == nil || slices.Contains(caller.GetGroups(), user.AllUnauthenticated) {
		return false
	}
	decision, _, err := r.Authorizer.Authorize(ctx, authorizer.AttributesRecord{User: caller, Verb: "get", Path: "/readyz/" + rightsCheck})
	return err == nil && decision == authorizer.DecisionAllow
}
