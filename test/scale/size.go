// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"flag"
	"fmt"
	"time"
)

// size is how large the cluster is, and how much happens in it.
type size struct {
	Nodes        int           `json:"nodes"`
	GPUsPerSlice int           `json:"gpusPerSlice"`
	Claims       int           `json:"claims"`
	Burst        int           `json:"burst"`
	Churn        time.Duration `json:"churnNanoseconds"`
	Rate         int           `json:"podsPerSecondInChurn"`
	AuditPeriod  time.Duration `json:"auditPeriodNanoseconds"`
	Seed         uint64        `json:"seed"`
}

// fullSize is what one cluster may have: 5,000 nodes is the limit that Kubernetes states.
var fullSize = size{
	Nodes: 5000, GPUsPerSlice: 1, Claims: 25000, Burst: 1000, Churn: 2 * time.Minute, Rate: 5, AuditPeriod: time.Minute, Seed: 1,
}

// gpusPerNode is that of an H100 or A100 server.
const gpusPerNode = 8

func (s *size) flags(flags *flag.FlagSet) {
	flags.IntVar(&s.Nodes, "nodes", s.Nodes, "nodes with 8 GPUs each")
	flags.IntVar(&s.GPUsPerSlice, "gpus-per-slice", s.GPUsPerSlice, "GPUs in a ResourceSlice: 1 as the node agent publishes them, or 2, 4, 8")
	flags.IntVar(&s.Claims, "claims", s.Claims, "claims that exist before the scheduler starts")
	flags.IntVar(&s.Burst, "burst", s.Burst, "pods that come at once")
	flags.DurationVar(&s.Churn, "churn", s.Churn, "how long pods end and others come")
	flags.IntVar(&s.Rate, "rate", s.Rate, "pods that end, and that come, per second of the churn")
	flags.DurationVar(&s.AuditPeriod, "audit-period", s.AuditPeriod, "the scheduler's auditPeriod, which is 10m as shipped")
	flags.Uint64Var(&s.Seed, "seed", s.Seed, "what chance begins with")
}

func (s *size) validate() error {
	switch {
	case s.Nodes < 1 || s.Claims < 1 || s.Burst < 1 || s.Rate < 0 || s.Churn < 0:
		return errors.New("-nodes, -claims and -burst must be 1 at least, -rate and -churn must not be negative")
	case s.GPUsPerSlice < 1 || gpusPerNode%s.GPUsPerSlice != 0:
		return fmt.Errorf("-gpus-per-slice: %d GPUs of a node cannot be spread evenly over slices of %d", gpusPerNode, s.GPUsPerSlice)
	case s.AuditPeriod < time.Second:
		return fmt.Errorf("-audit-period: %s is less than the second that the scheduler accepts", s.AuditPeriod)
	}
	return nil
}

func (s *size) gpus() int { return s.Nodes * gpusPerNode }
