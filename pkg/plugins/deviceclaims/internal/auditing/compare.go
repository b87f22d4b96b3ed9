// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package auditing

import (
	"context"
	"fmt"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/pager"
	"k8s.io/klog/v2"

	"stowage.dev/stowage/pkg/audit"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podevents"
	"stowage.dev/stowage/pkg/tracker"
)

const (
	// pageSize is how many claims one request of the comparison gets.
	pageSize = 1000
	// timeout bounds one comparison.
	timeout = 2 * time.Minute
	// Attempts is how often one comparison begins anew because the API server no longer had the version that it asked for.
	Attempts = 3
)

// Compare compares the tracker with the API at the tracker's own resource version.
func (a *Auditor) Compare(ctx context.Context) {
	bounded, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	logger := klog.FromContext(ctx)
	account, listed, err := a.accountAndList(bounded)
	if ctx.Err() != nil {
		return // the scheduler ends
	}
	a.reportStale(logger, account.InFlight)
	a.reportComparison(logger, account.Version, err)
	if err != nil {
		return
	}
	differences := audit.Compare(account, listed)
	counts := map[audit.Kind]int{}
	for i, d := range differences {
		counts[d.Kind]++
		if i < MaxReports {
			logger.Error(nil, "What is known of a claim differs from the API", "claim", klog.KRef(d.Claim.Namespace, d.Claim.Name),
				"claimUID", d.Claim.UID, "kind", d.Kind, "detail", d.Detail, "resourceVersion", account.Version)
			a.event(logger, a.claim(d.Claim), "AccountDiffers", "what the scheduler knows of the claim differs from the API (%s): %s",
				d.Kind, d.Detail)
		}
	}
	if more := len(differences) - MaxReports; more > 0 {
		logger.Error(nil, "What is known of further claims differs from the API", "claims", more, "resourceVersion", account.Version)
	}
	for _, kind := range audit.Kinds {
		Differences.WithLabelValues(string(kind)).Set(float64(counts[kind]))
	}
	logger.V(4).Info("Claims compared with the API", "resourceVersion", account.Version, "claims", len(listed),
		"differences", len(differences))
}

// accountAndList returns the tracker's account, and all claims as the API had them at its version. The API server keeps old versions for
// some minutes only, so both are taken anew if that one has expired.
func (a *Auditor) accountAndList(ctx context.Context) (tracker.Account, []*resourceapi.ResourceClaim, error) {
	for attempt := 1; ; attempt++ {
		account := a.tracker.Account()
		listed, err := a.list(ctx, account.Version)
		if !apierrors.IsResourceExpired(err) || attempt == Attempts {
			return account, listed, err
		}
	}
}

// list returns all claims as they were at the version, of each what Compare needs.
func (a *Auditor) list(ctx context.Context, version string) ([]*resourceapi.ResourceClaim, error) {
	p := pager.New(func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
		if options.Continue != "" {
			// The token has the version. The API server refuses a request with both, which EachListItem would send.
			options.ResourceVersion, options.ResourceVersionMatch = "", ""
		}
		return a.client.ResourceV1().ResourceClaims(metav1.NamespaceAll).List(ctx, options)
	})
	p.PageSize = pageSize
	p.PageBufferSize = 0 // a page at a time
	var claims []*resourceapi.ResourceClaim
	options := metav1.ListOptions{ResourceVersion: version, ResourceVersionMatch: metav1.ResourceVersionMatchExact}
	err := p.EachListItem(ctx, options, func(obj runtime.Object) error {
		claim, ok := obj.(*resourceapi.ResourceClaim)
		if !ok {
			return fmt.Errorf("unexpected object of type %T in a list of ResourceClaims", obj)
		}
		claims = append(claims, &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{
			Namespace: claim.Namespace, Name: claim.Name, UID: claim.UID, ResourceVersion: claim.ResourceVersion,
		}})
		return nil
	})
	return claims, err
}

// reportComparison counts whether a comparison could be made, and logs it when that changes.
func (a *Auditor) reportComparison(logger klog.Logger, version string, err error) {
	if err == nil {
		ComparisonsTotal.WithLabelValues("done").Inc()
		LastComparison.Set(float64(a.Clock.Now().Unix()))
	} else {
		ComparisonsTotal.WithLabelValues("error").Inc()
	}
	before := a.failing
	a.failing = podevents.Failure(err)
	switch {
	case a.failing == before:
	case err != nil:
		logger.Error(err, "Claims cannot be compared with the API, trying again every period", "resourceVersion", version, "period", a.period)
	default:
		logger.Info("Claims are compared with the API again", "resourceVersion", version)
	}
}
