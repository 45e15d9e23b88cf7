// The headers behind optim.def.
#pragma once

#include "optim/adagrad.h"
#include "optim/adam.h"
#include "optim/adamw.h"
#include "optim/lion.h"
#include "optim/rmsprop.h"
#include "optim/sgd.h"
#include "optim/sgdw.h"
